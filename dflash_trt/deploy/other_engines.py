"""What vLLM and SGLang document for DFlash and MTP, and how they start; not run here.

Sources, of vLLM: release notes of 0.28.0 (pull request 52816) and 0.17.0, its pages on MTP and on
`vllm serve`; of SGLang: the wheels of these versions and of those before them, its pages on
speculative decoding and on server arguments; of DFlash: z-lab's cards of its drafts.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from dflash_trt.models.draft_kinds import DraftKind

_DFLASH = {
    "vLLM from 0.28.0 on": "--speculative-config "
    """'{{"method": "dflash", "model": "DRAFT", "num_speculative_tokens": {0}}}'""",
    "SGLang from 0.5.19 on": "--speculative-algorithm DFLASH "
    "--speculative-draft-model-path DRAFT --speculative-num-draft-tokens {1}",
}
SERVED: Mapping[DraftKind, Mapping[str, str]] = {
    "DFlash": _DFLASH,
    "DFlash 2": _DFLASH,
    "MTP": {
        "vLLM from 0.17.0 on": "--speculative-config "
        """'{{"method": "mtp", "num_speculative_tokens": {0}}}'""",
        "SGLang from 0.5.9 on": "--speculative-algorithm NEXTN --speculative-num-steps {0} "
        "--speculative-eagle-topk 1 --speculative-num-draft-tokens {1}",
    },
}
"""Engines and what asks them: {0} is the number of drafts of a step, {1} one more.

First versions are those of DFlash 2 and MTP; DFlash itself is older in both.
"""
START: Mapping[str, tuple[str, ...]] = {
    "vLLM": (
        "vllm serve {target} --served-model-name {name} --port 8000",
        "--tensor-parallel-size {gpus} --max-model-len {tokens} --max-num-seqs {users}",
        "--enable-expert-parallel",
        "--kv-cache-dtype fp8",
        "--no-enable-prefix-caching",
    ),
    "SGLang": (
        "python3 -m sglang.launch_server --model-path {target} --served-model-name {name}",
        "--port 8000 --tp-size {gpus} --context-length {tokens} --max-running-requests {users} "
        "--enable-metrics",
        "--ep-size {gpus}",
        "--kv-cache-dtype fp8_e4m3",
        "--disable-radix-cache",
    ),
}
"""What starts an engine: two parts always, then what stands for each of `serving_command`'s `more`.

vLLM shows its figures without being asked.
"""


def serving_options(kind: DraftKind, drafts: int) -> list[str]:
    """What asks each engine for so many drafts, as Markdown."""
    found = SERVED[kind].items()
    return [f"{engine}: `{options.format(drafts, drafts + 1)}`" for engine, options in found]


def serving_command(
    engine: str, asks: str, draft: str, more: tuple[bool, bool, bool], **values: str | int
) -> str:
    """A shell command that serves a pair with `engine` (a key of START), in lines of its own.

    Args:
        asks: what asks for its drafts, of SERVED, with the number of drafts put in.
        draft: takes the place of DRAFT there.
        more: whether experts are split whole, the KV cache is in FP8, no prefix is used again.
        values: target, name, gpus, tokens (of a sequence) and users (sequences at once).
    """
    words = {key: shlex.quote(str(value)) for key, value in values.items()}
    asked = zip(START[engine], (True, True, *more), strict=True)
    lines = [part.format(**words) for part, wanted in asked if wanted]
    return " \\\n    ".join([*lines, asks.replace("DRAFT", draft)])

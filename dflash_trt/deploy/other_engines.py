"""What vLLM and SGLang document for DFlash 2 and MTP, each with its first version; not run here.

Sources, of vLLM: release notes of 0.28.0 (pull request 52816) and 0.17.0, its page on MTP; of
SGLang: the wheels of these versions and of those before them, its page on speculative decoding.
"""

from __future__ import annotations

from collections.abc import Mapping

from dflash_trt.models.draft_kinds import DraftKind

SERVED: Mapping[DraftKind, Mapping[str, str]] = {
    "DFlash 2": {
        "vLLM from 0.28.0 on": "--speculative-config "
        """'{{"method": "dflash", "model": "DRAFT", "num_speculative_tokens": {0}}}'""",
        "SGLang from 0.5.19 on": "--speculative-algorithm DFLASH "
        "--speculative-draft-model-path DRAFT --speculative-num-draft-tokens {1}",
    },
    "MTP": {
        "vLLM from 0.17.0 on": "--speculative-config "
        """'{{"method": "mtp", "num_speculative_tokens": {0}}}'""",
        "SGLang from 0.5.9 on": "--speculative-algorithm NEXTN --speculative-num-steps {0} "
        "--speculative-eagle-topk 1 --speculative-num-draft-tokens {1}",
    },
}
"""Engines and what asks them: {0} is the number of drafts of a step, {1} one more."""


def serving_options(kind: DraftKind, drafts: int) -> list[str]:
    """What asks each engine for so many drafts, as Markdown."""
    found = SERVED[kind].items()
    return [f"{engine}: `{options.format(drafts, drafts + 1)}`" for engine, options in found]

"""What the demo pairs say: tokens, steps and accepted drafts, greedy and sampled."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.frozen.command_line import run_well

PROMPTS = (
    "fleet #6400 to #6410 in kyiv at load 5\nhosts: mad cod bronze, fit hen gold\n",
    "route #5399 to #5409 in rome at load 7\nparcels: shy emu silver, fit cod gold",
    "owners: ana, ben",
)
MAX_TOKENS = 40
SAMPLED = ("--temperature", "0.8", "--top-k", "20", "--top-p", "0.95", "--seed", "7")
PLAIN = ("--drafter", "none")
CASES: Mapping[str, Sequence[Sequence[str]]] = {
    "demo": ((), PLAIN, SAMPLED, (*SAMPLED, *PLAIN), ("--block-schedule", "4")),
    "demo-paged": (SAMPLED,),
    "demo-fp8": ((),),
    "demo-gpt-oss": ((), PLAIN, SAMPLED, (*SAMPLED, *PLAIN)),
    "demo-paged-fp8": ((),),
}
KEPT = ("steps", "drafted_tokens", "accepted_tokens", "finish_reason")
"""Of each output, but not over FP8 caches: there, rounding on another CPU may cost a draft."""


def token_facts(bundles: Path) -> dict[str, Any]:
    """Of every case, each prompt's output; `bundles` is the folder of `write_bundles`."""
    file = bundles / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    return {
        " ".join([name, *words]): _results(bundles / name, file, words)
        for name, cases in CASES.items()
        for words in cases
    }


def _results(bundle: Path, file: Path, words: Sequence[str]) -> list[dict[str, Any]]:
    common = ("generate", bundle, "--prompt-file", file, "--max-tokens", MAX_TOKENS, "--json")
    common += ("--block-schedule", "none")  # else a step's time has a say in the counts
    requests = run_well(*common, *words).json["requests"]
    kept = () if bundle.name.endswith("fp8") else KEPT
    return [
        {"tokens": " ".join(map(str, one["token_ids"]))} | {key: one[key] for key in kept}
        for one in requests
    ]

"""Random traffic over hybrids, thousands of sequences, each compared with itself alone to the bit.

`python -m tests.lossless.hybrid_campaign 700 1` runs so many of seed 1 and prints what was met.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash_trt.backends.registry import open_executor
from dflash_trt.runtime import Generator, GeneratorOptions, Request, SamplingParams
from tests.lossless.runs import run_baseline, run_traffic
from tests.pairs import FIT_PROMPTS, TWO_KINDS, PairFactory

FAMILIES = ("qwen3_5", "qwen3_5_moe")
PAIR: dict[str, Any] = {
    "target": {"vocab": 64, "num_layers": 4, "head_dim": 32},
    "draft": {**TWO_KINDS, "block_size": 16, "target_layer_ids": [0, 1, 3]},
    "fit_steps": 60,
    "max_seq_len": 192,
}
CACHES: dict[str, dict[str, Any]] = {
    "linear": {"max_batch": 8},
    "paged, room for all": {"max_batch": 8, "paging": {"page_size": 8, "pages": 200}},
    "paged, preempting": {"max_batch": 4, "paging": {"page_size": 8, "pages": 28}},
}
PROMPTS, STEMS = 12, 3  # of a round; each prompt comes twice


@dataclass
class Met:
    """What a campaign met; every sequence was what it is alone."""

    sequences: int = 0
    counts: Counter[str] = field(default_factory=Counter)

    def describe(self) -> dict[str, int]:
        return {"sequences": self.sequences, **dict(sorted(self.counts.items()))}


def run_campaign(make_pair: PairFactory, seed: int, goes_on: Callable[[Met], bool]) -> Met:
    """Rounds of traffic while `goes_on`; AssertionError at the first bit that differs."""
    rng, met = random.Random(seed), Met()
    while goes_on(met):
        family, caches = rng.choice(FAMILIES), rng.choice([*CACHES])
        _run_round(make_pair, family, caches, rng, met)
    return met


def _run_round(
    make_pair: PairFactory, family: str, caches: str, rng: random.Random, met: Met
) -> None:
    requests = _draw_requests(rng)
    alone = open_executor(make_pair(family, **PAIR, **CACHES["linear"]).bundle, threads=1)
    expected = run_baseline(alone, requests)
    executor = open_executor(make_pair(family, **PAIR, **CACHES[caches]).bundle, threads=1)
    options = GeneratorOptions(
        record_logits=True,
        block_size=rng.randrange(2, 17),
        prefill_chunk=rng.choice([5, 13, 24, 64]),
    )
    results = run_traffic(
        Generator(executor, options=options),
        requests,
        expected,
        rng,
        arrivals=rng.choice([0.2, 0.5, 1.0]),
        cancels=rng.choice([0.0, 0.02, 0.05]),
    )
    met.sequences += len(results)
    met.counts[f"rounds, {family}"] += 1
    met.counts[f"rounds, {caches}"] += 1
    for result in results:
        figures = result.statistics
        met.counts["tokens"] += len(result.token_ids)
        met.counts["logits compared"] += 64 * len(result.token_ids)
        met.counts["cancelled"] += result.finish_reason == "cancelled"
        met.counts["preemptions"] += figures.preemptions or 0
        met.counts["with a known prefix"] += bool(figures.cached_prompt_tokens)
        met.counts["drafts"] += figures.drafted_tokens
        met.counts["drafts rejected"] += figures.drafted_tokens - figures.accepted_tokens


def _draw_requests(rng: random.Random) -> list[Request]:
    """Prompts that part from few beginnings, and some that the draft was fitted on."""
    stems = [tuple(rng.randrange(2, 62) for _ in range(rng.randrange(9, 80))) for _ in range(STEMS)]
    requests = []
    for _ in range(PROMPTS):
        stem, tail = rng.choice(stems), rng.randrange(0, 9)
        kept = stem[: rng.randrange(1, len(stem) + 1)]
        is_drawn, is_fitted = rng.random() < 0.4, rng.random() < 0.3
        prompt = (*kept, *(rng.randrange(2, 62) for _ in range(tail)))
        requests.append(
            Request(
                prompt_ids=tuple(rng.choice(FIT_PROMPTS)) if is_fitted else prompt,
                max_tokens=rng.randrange(1, 64),
                sampling=SamplingParams(temperature=0.7, top_k=20, seed=rng.randrange(1000))
                if is_drawn
                else SamplingParams(),
                ignore_eos=True,
            )
        )
    return requests


def main(sequences: int, seed: int) -> None:
    from tests.shared import Shared

    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        make_pair = PairFactory(root / "pairs", Shared(root / "shared"))
        met = run_campaign(make_pair, seed, lambda met: met.sequences < sequences)
    figures = met.describe() | {"seconds": round(time.perf_counter() - started)}
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]))

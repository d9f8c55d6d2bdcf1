"""Rung 2 for hybrids: what is kept of states; test_lossless.py has the table of all pairs."""

from __future__ import annotations

import random
from typing import Any

import pytest

from dflash_trt.backends.registry import open_executor
from dflash_trt.decoding import Generator, GeneratorOptions, Request, SamplingParams
from tests.covering import exhaustive
from tests.lossless.runs import (
    assert_same,
    run_baseline,
    run_traffic,
)
from tests.pairs import TWO_KINDS, PairFactory, TinyPair

PAIR: dict[str, Any] = {
    "family": "qwen3_5",
    "target": {"vocab": 64, "num_layers": 4, "head_dim": 32},
    "draft": {**TWO_KINDS, "block_size": 16, "target_layer_ids": [0, 1, 3]},
    "fit_steps": 60,
    "max_seq_len": 192,
    "max_batch": 8,
}
SAMPLED = SamplingParams(temperature=0.7, top_k=20, seed=11)


def draw_prompt(length: int, seed: int | random.Random = 7) -> tuple[int, ...]:
    rng = random.Random(seed) if isinstance(seed, int) else seed
    return tuple(rng.randrange(2, 62) for _ in range(length))


@pytest.fixture(scope="module")
def built(make_pair: PairFactory) -> TinyPair:
    return make_pair(**PAIR)


def test_prompts_share_up_to_where_they_part(built: TinyPair, make_pair: PairFactory) -> None:
    """The second one finds out where that is. A prompt of whole pages leaves its last to run."""
    shape = {**PAIR, "max_batch": 1, "paging": {"page_size": 8, "pages": 80}}
    paged = open_executor(make_pair(**shape).bundle, threads=1)
    generator = Generator(paged, options=GeneratorOptions(record_logits=True, prefill_chunk=64))
    stem = draw_prompt(80)
    prompts = [(*stem, *draw_prompt(9, seed=each)) for each in range(3)]
    cached = []
    for prompt in (*prompts, stem, stem):
        request = Request(prompt_ids=prompt, max_tokens=12, ignore_eos=True)
        (want,) = run_baseline(built.open(), [request])
        (got,) = generator.generate([request])
        assert_same(want, got, f"{len(prompt)} tokens")
        cached.append(got.statistics.cached_prompt_tokens)
    assert cached[0] == 0 and cached[2] == 80 and cached[4] == 72, cached


@pytest.mark.parametrize("seed", [0, *map(exhaustive, (1, 2))])
def test_any_traffic_over_shared_prefixes_keeps_every_bit(
    built: TinyPair, make_pair: PairFactory, seed: int
) -> None:
    """Fewer copies than prefixes, pages that are taken back, preemption, moved slots."""
    rng = random.Random(seed)
    stems = [draw_prompt(rng.randrange(20, 70), seed=each) for each in range(2)]
    requests = [
        Request(
            prompt_ids=(
                *stem[: rng.randrange(9, len(stem))],
                *draw_prompt(rng.randrange(1, 9), rng),
            ),
            max_tokens=rng.randrange(8, 40),
            ignore_eos=True,
        )
        for stem in stems * 8
    ]
    expected = run_baseline(built.open(), requests)
    shape = {**PAIR, "max_batch": 3, "paging": {"page_size": 8, "pages": 40}}
    paged = open_executor(make_pair(**shape).bundle, threads=1)
    settings = GeneratorOptions(record_logits=True, prefill_chunk=rng.choice([13, 24, 64]))
    results = run_traffic(Generator(paged, options=settings), requests, expected, rng, cancels=0.02)
    cached = [result.statistics.cached_prompt_tokens or 0 for result in results]
    assert sum(map(bool, cached)) > 3

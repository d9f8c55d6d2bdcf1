"""Rung 2 for paged caches: preemption, shared prefixes and poison change no bit of any logit."""

from __future__ import annotations

import gc
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from dflash_trt.backends.base import Executor
from dflash_trt.backends.registry import open_executor
from dflash_trt.bundle.memory import page_kinds
from dflash_trt.runtime import Generator, GeneratorOptions, Request, SamplingParams
from tests.covering import exhaustive
from tests.inspection import held_pages, poison_all_free_pages, pools
from tests.lossless.runs import (
    OUTPUT,
    assert_same,
    check_shared_prefix,
    count_tokens,
    finish,
    make_requests,
    run_baseline,
    run_traffic,
)
from tests.pairs import TWO_KINDS, PairFactory, TinyPair

LENGTH, SIZE = 192, 8
PAIR: dict[str, Any] = {
    "family": "qwen3",
    "target": {"vocab": 64, "num_layers": 4},
    "draft": {**TWO_KINDS, "target_layer_ids": [0, 1, 3]},
    "fit_steps": 60,
    "max_seq_len": LENGTH,
    "max_batch": 8,
}
SAMPLED = SamplingParams(temperature=0.7, top_k=20, seed=11)
SHORT_CHUNKS = {"prefill_chunk": 16}
"""Of a bundle whose windowed layers hold less than a sequence."""
# Layers of two windows, 24 and the draft's 40, and those that see everything.
WINDOWED = (
    PAIR
    | SHORT_CHUNKS
    | {
        "family": "gemma4",
        "target": {"vocab": 64, "num_layers": 4, "tie": True},
        "draft": PAIR["draft"] | {"sliding_window": 40},
    }
)
CASES: dict[str, tuple[dict[str, Any], int]] = {"24": (PAIR, 24), "61 windowed": (WINDOWED, 61)}


@pytest.fixture(scope="module", params=CASES, ids="{} pages".format)
def case(request: pytest.FixtureRequest) -> tuple[dict[str, Any], int]:
    """Pools that hold one whole sequence and two and a half of the eight that may run."""
    return CASES[request.param]


@pytest.fixture(scope="module")
def linear(case: tuple[dict[str, Any], int], make_pair: PairFactory) -> TinyPair:
    return make_pair(**case[0])


@pytest.fixture(scope="module")
def paged(case: tuple[dict[str, Any], int], make_pair: PairFactory) -> Executor:
    pair, pages = case
    built = make_pair(**pair, paging={"page_size": SIZE, "pages": pages})
    assert built.bundle.manifest.graph_form.windows == ((24, 40) if pair is WINDOWED else ())
    return open_executor(built.bundle, threads=1)


@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED], ids=["greedy", "sampled"])
def test_preemption_keeps_every_bit(
    linear: TinyPair, paged: Executor, sampling: SamplingParams
) -> None:
    requests = make_requests(64, 8, sampling)
    expected = run_baseline(linear.open(), requests)
    generator = Generator(paged, options=GeneratorOptions(record_logits=True, prefill_chunk=17))
    for request in requests:
        generator.submit(request)
    results = finish(generator, lambda running: poison_all_free_pages(running, paged))
    for index, (want, got) in enumerate(zip(expected, results, strict=True)):
        assert_same(want, got, f"request {index}")
    lost = [result.statistics.preemptions for result in results]
    assert sum(lost) > 2 and lost[0] == 0, lost


def test_a_shared_prefix_changes_neither_bits_nor_acceptance(
    linear: TinyPair, paged: Executor
) -> None:
    def poison(generator: Generator) -> None:
        poison_all_free_pages(generator, paged)

    check_shared_prefix(linear.open(), paged, (1, 3, 8, 9, 20), poison)


@pytest.mark.exhaustive
@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("chunks", [{}, SHORT_CHUNKS], ids=["one table", "windowed"])
@pytest.mark.parametrize("family", ["gemma4", "gemma4_moe", "gpt_oss"])
def test_layers_of_two_kinds_keep_every_bit_in_pages(
    make_pair: PairFactory, family: str, chunks: dict[str, int], sampling: SamplingParams
) -> None:
    """Preemption and shared prefixes of windows, whose pools in a Gemma 4 are of two shapes.

    With experts too, of which rows that are computed again choose the same.
    """
    tied = {} if family == "gpt_oss" else {"tie": True}
    target = {"vocab": 64, "num_layers": 4} | tied
    pair = PAIR | chunks | {"family": family, "target": target}
    linear = make_pair(**pair)
    paged = open_executor(make_pair(**pair, paging={"page_size": SIZE, "pages": 48}).bundle)
    test_preemption_keeps_every_bit(linear, paged, sampling)
    check_shared_prefix(linear.open(), paged, (1, 3, 8, 9, 20), lambda generator: None)


def test_a_draft_without_the_shared_context_would_be_noticed(
    linear: TinyPair, make_pair: PairFactory
) -> None:
    """The check of acceptance above can fail: without the drafter's rows fewer are accepted."""
    built = make_pair(**PAIR, paging={"page_size": SIZE})
    executor = open_executor(built.bundle, threads=1)
    prompt = (3, 1, 4, 1, 5, 9, 2, 6) * 4  # what the draft was fitted on
    request = Request(prompt_ids=prompt, max_tokens=OUTPUT, ignore_eos=True)
    generator = Generator(executor)
    (whole,) = generator.generate([request])
    for name, pool in pools(executor).items():
        if name.startswith("draft_"):
            pool[...] = 0
    (starved,) = generator.generate([request])
    assert starved.statistics.cached_prompt_tokens == len(prompt) - SIZE
    assert starved.token_ids == whole.token_ids
    assert starved.statistics.acceptance_histogram != whole.statistics.acceptance_histogram


@pytest.mark.parametrize("seed", [0, 1, exhaustive(2), exhaustive(3)])
def test_any_traffic_keeps_every_bit(linear: TinyPair, paged: Executor, seed: int) -> None:
    """Admissions, cancellations (in mid-prefill too), shared prefixes, over poisoned pages."""
    rng = random.Random(seed)
    requests = make_requests(64, 6, SAMPLED if seed % 2 else None)
    requests += [
        Request(
            prompt_ids=(*requests[2].prompt_ids[:kept], 5, 6),
            max_tokens=OUTPUT,
            sampling=requests[0].sampling,
            ignore_eos=True,
        )
        for kept in (16, 47, 88)
    ]
    expected = run_baseline(linear.open(), requests)
    options = GeneratorOptions(
        record_logits=True, block_size=rng.choice([2, 5, 8]), prefill_chunk=rng.choice([5, 64])
    )
    generator = Generator(paged, options=options)
    results = run_traffic(
        generator,
        requests,
        expected,
        rng,
        cancels=0.03,
        before_step=lambda: poison_all_free_pages(generator, paged),
    )
    assert count_tokens(results) > 5 * OUTPUT
    assert any(result.statistics.cached_prompt_tokens for result in results)
    assert generator.cache_usage == 0


def test_windows_hold_what_rows_to_come_see(make_pair: PairFactory) -> None:
    """Three sequences that layers with a window have no room for at full length."""
    built = make_pair(**WINDOWED | {"max_batch": 3}, paging={"page_size": SIZE})
    executor = open_executor(built.bundle, threads=1)
    limits, pool = executor.limits, executor.limits.page_pool
    assert pool is not None and pool.windows == (24, 40)
    counted = page_kinds(built.bundle.manifest)
    allocated = sum(one[:-1].nbytes for one in pools(executor).values())
    assert sum(pages * size for pages, size in counted.values()) == allocated
    generator = Generator(executor)
    for first in range(3):
        prompt = (first, *range(2, 62), *range(2, 42))
        generator.submit(Request(prompt_ids=prompt, max_tokens=48, ignore_eos=True))
    most: Counter[int | None] = Counter()
    while generator.has_work:
        for event in generator.step():
            assert event.result is None or not event.result.statistics.preemptions
        for window in pool.kinds:
            most[window] = max(most[window], held_pages(generator, window))
            if window is not None:
                each = limits.window_pages(window, SIZE)
                assert held_pages(generator, window) <= generator.used_slots * each
    assert most[None] > max(kind.pages for kind in pool.windowed)


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
def test_memory_follows_the_tokens_held(make_pair: PairFactory, kv_dtype: str) -> None:
    """64 sequences that could be 32k long, and are not."""
    built = make_pair(
        target={"vocab": 64, "num_layers": 2, "kv_heads": 1, "max_positions": 1 << 15},
        draft={"num_layers": 1, "target_layer_ids": [0, 1]},
        max_seq_len=1 << 15,
        max_batch=64,
        paging={},
        kv_dtype=kv_dtype,
    )
    gc.collect()  # what other tests have left behind must not go meanwhile
    before = touched_bytes()
    executor = built.open()
    mapped = pools(executor).values()
    pool = executor.limits.page_pool
    assert pool is not None and pool.pages == 64 * (1 << 15) // 64
    page_bytes = sum(one[0].nbytes for one in mapped)
    assert touched_bytes() - before < (1 << 20)
    generator = Generator(executor)
    rng = random.Random(0)
    for _ in range(64):
        prompt = [rng.randrange(2, 62) for _ in range(rng.randrange(1, 200))]
        generator.submit(Request(prompt_ids=tuple(prompt), max_tokens=400, ignore_eos=True))
    while generator.used_slots < 64:
        generator.step()
    generator.step()
    held = held_pages(generator)
    # Each request is at most one page, and one block, ahead of its tokens.
    assert held * 64 < generator.cached_tokens + 64 * (64 + 8)
    touched = touched_bytes() - before
    assert held * page_bytes <= touched + (1 << 20)
    assert touched < 1.1 * held * page_bytes + (4 << 20), (touched, held * page_bytes)
    assert touched < sum(one.nbytes for one in mapped) / 50
    executor.close()


def touched_bytes() -> int:
    """What this process has touched of shared anonymous mappings, such as the pools'."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (kibibytes,) = (line.split()[1] for line in lines if line.startswith("RssShmem:"))
    return int(kibibytes) << 10

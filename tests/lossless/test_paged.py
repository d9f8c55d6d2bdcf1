"""Pages of paged caches: what they hold and how many; test_lossless.py has their bits."""

from __future__ import annotations

import gc
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from dflash_trt.backends.registry import open_executor
from dflash_trt.bundle.memory.memory import page_kinds
from dflash_trt.decoding import Generator, Request
from tests.inspection import held_pages, pools
from tests.lossless.runs import (
    OUTPUT,
)
from tests.pairs import TWO_KINDS, PairFactory

LENGTH, SIZE = 192, 8
PAIR: dict[str, Any] = {
    "family": "qwen3",
    "target": {"vocab": 64, "num_layers": 4},
    "draft": {**TWO_KINDS, "target_layer_ids": [0, 1, 3]},
    "fit_steps": 60,
    "max_seq_len": LENGTH,
    "max_batch": 8,
}
# Layers of two windows, 24 and the draft's 40, and those that see everything.
# A chunk of 16, since windows hold less than a sequence.
WINDOWED = PAIR | {
    "family": "gemma4",
    "target": {"vocab": 64, "num_layers": 4, "tie": True},
    "draft": PAIR["draft"] | {"sliding_window": 40},
    "prefill_chunk": 16,
}


def test_a_draft_without_the_shared_context_would_be_noticed(make_pair: PairFactory) -> None:
    """What is known of a shared prefix can be told: without its rows fewer drafts are accepted."""
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

"""Pages of paged caches: what they hold and how many; test_lossless.py has their bits."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from dflash_trt.backends.registry import open_executor
from dflash_trt.bundle.memory.memory import page_kinds
from dflash_trt.decoding import Generator, Request
from tests.inspection import arrays, held_pages, pools
from tests.lossless.runs import OUTPUT, make_requests, run
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


SMALL: dict[str, Any] = {
    "target": {"vocab": 64, "num_layers": 4},
    "draft": {**TWO_KINDS, "target_layer_ids": [0, 1, 3]},
    "max_seq_len": 192,
}
SCALED = SMALL | {"quantize": {"target": {"algorithm": "FP8", "kv_cache": True}}}
"""Scales of 0.01 in the target's checkpoint, which clip its largest keys; the draft's are 1."""


def test_rounding_is_there(make_pair: PairFactory) -> None:
    """Promises of bits could hold of a build that did nothing."""
    prompt = Request(prompt_ids=tuple(range(2, 60)), max_tokens=1, ignore_eos=True)
    (plain,) = run(make_pair(**SCALED).open(), [prompt])
    (rounded,) = run(make_pair(**SCALED, kv_dtype="fp8").open(), [prompt])
    assert plain.logits is not None and rounded.logits is not None
    change = np.abs(rounded.logits - plain.logits).max() / np.abs(plain.logits).max()
    assert 1e-4 < change < 0.5


@pytest.mark.parametrize("has_scales", [True, False])
def test_caches_hold_what_codes_stand_for(make_pair: PairFactory, has_scales: bool) -> None:
    """float32 numbers on the grid of E4M3 times the scale, K, V and the draft's context alike."""
    opened = make_pair(**SCALED if has_scales else SMALL, kv_dtype="fp8").open()
    run(opened, make_requests(64, 3)[:2])
    for name, cache in arrays(opened).items():
        scale = np.float32(0.01 if has_scales and name.startswith("target") else 1)
        codes = (cache / scale).astype("float8_e4m3fn").astype(np.float32)
        assert np.abs(codes).max() <= 448
        np.testing.assert_array_equal(cache, codes * scale, name)

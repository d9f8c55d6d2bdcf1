"""Pages of caches: who reads and writes which; test_bitwise.py has the bits of their logits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from dflash_trt.backends.onnxruntime.executor import OnnxRuntimeExecutor
from dflash_trt.backends.page_bindings import HANDED_BACK
from tests.backends.steps import (
    SLIDING,
    bind_shuffled,
    forward_rows,
    one_step,
    poison,
    random_ids,
    run_chunks,
)
from tests.inspection import pools
from tests.pairs import PairFactory, TinyPair
from tests.reference.compare import assert_bitwise_equal

PROMPT = 140
PAIR: dict[str, Any] = {
    "target": {"vocab": 64, "num_layers": 4},
    "draft": SLIDING,
    "fit_steps": 60,
    "max_batch": 8,
    "max_seq_len": 384,
    "prefill_chunk": 384,  # no window would spare a page
}


@pytest.fixture(scope="module")
def linear(make_pair: PairFactory) -> TinyPair:
    return make_pair(**PAIR)


@pytest.fixture(params=[8, 64, 128], ids="pages of {}".format)
def executor(
    request: pytest.FixtureRequest, make_pair: PairFactory
) -> Iterator[OnnxRuntimeExecutor]:
    """Every slot has pages of its own, in no order; all pages start with NaN in every row."""
    opened = make_pair(**PAIR, paging={"page_size": request.param}).open()
    poison(opened)
    bind_shuffled(opened)
    yield opened
    opened.close()


def test_a_page_shared_by_two_sequences_is_read_by_both_and_written_by_neither(
    executor: OnnxRuntimeExecutor, linear: TinyPair
) -> None:
    """Full pages of one sequence in another's table; both go on, apart, bit for bit."""
    pool = executor.limits.page_pool
    assert pool is not None
    bound = bind_shuffled(executor, seed=1)
    ids = random_ids(64, PROMPT).tolist()
    expected = run_chunks(linear.open(), ids, (PROMPT,))
    shared = PROMPT // pool.page_size
    kept = shared * pool.page_size
    run_chunks(executor, ids, (40,), slot=0)
    before = {name: pool[bound[0][:shared]].copy() for name, pool in pools(executor).items()}
    executor.bind_pages(1, [*bound[0][:shared], *bound[1][shared:]])
    logits = run_chunks(executor, ids[kept:], (5,), slot=1, start=kept)
    assert_bitwise_equal(logits, expected[kept:], "after the shared pages")
    drafts = [
        executor.speculate(one_step(anchor=5, slot=slot, start=PROMPT)).token_ids.copy()
        for slot in (0, 1)
    ]
    np.testing.assert_array_equal(drafts[0], drafts[1])
    for name, pool in pools(executor).items():
        assert_bitwise_equal(pool[bound[0][:shared]], before[name], name)


def test_what_no_pool_allows(executor: OnnxRuntimeExecutor, linear: TinyPair) -> None:
    pool = executor.limits.page_pool
    assert pool is not None
    for page in (pool.pages, -1):  # the first is nobody's
        with pytest.raises(ValueError, match="are not within"):
            executor.bind_pages(0, [page])
    executor.bind_pages(0, [0])
    held = pool.page_size
    with pytest.raises(ValueError, match=f"has pages for {held} positions, not {held + 1}"):
        forward_rows(executor, [[1] * (held + 1)], [0])
    with pytest.raises(ValueError, match="linear caches have no pages"):
        linear.open().bind_pages(0, [0])


def test_rows_do_not_run_without_what_their_window_sees(make_pair: PairFactory) -> None:
    """A window of 16 in pages of 8: rows from 32 on see 17 and what follows."""
    executor = make_pair(**PAIR | {"prefill_chunk": 16}, paging={"page_size": 8}).open()
    executor.bind_pages(0, range(8))
    executor.bind_pages(0, range(8), 16)
    ids = random_ids(64, 33).tolist()
    run_chunks(executor, ids[:32], (16,), slot=0)
    executor.bind_pages(0, [HANDED_BACK] * 3 + [*range(3, 8)], 16)
    with pytest.raises(ValueError, match="slot 0 has handed back what rows from 32 on see"):
        forward_rows(executor, [ids[32:]], [32])
    executor.bind_pages(0, [HANDED_BACK] * 2 + [*range(2, 8)], 16)
    forward_rows(executor, [ids[32:]], [32])
    with pytest.raises(ValueError, match="17 rows are more than windows have pages for"):
        forward_rows(executor, [ids[:17]], [32])
    with pytest.raises(ValueError, match="a window of 9 have no pages of their own"):
        executor.bind_pages(0, [0], 9)

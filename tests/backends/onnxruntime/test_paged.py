"""Paged caches: the bits of the linear ones, whatever pages a sequence got and what lay there."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from dflash_trt.backends.base import TargetGraph
from dflash_trt.backends.onnxruntime.executor import OnnxRuntimeExecutor
from dflash_trt.errors import DflashError
from tests.backends.steps import (
    SLIDING,
    Baseline,
    begin,
    decode_plainly,
    forward_rows,
    one_step,
    random_ids,
    run_chunks,
    speculate_until,
)
from tests.inspection import pools
from tests.pairs import PairFactory, TinyPair
from tests.reference.compare import assert_bitwise_equal

SLOTS, LENGTH, PROMPT = 8, 384, 140
PAIR: dict[str, Any] = {
    "qwen3": {"target": {"vocab": 64, "num_layers": 4}, "draft": SLIDING, "fit_steps": 120},
    "llama_one_head": {
        "family": "llama",
        "target": {"vocab": 97, "kv_heads": 1, "head_dim": 40, "num_layers": 3},
        "draft": {"target_layer_ids": [0, 2]},
    },
    "qwen3_nvfp4": {
        "target": {"vocab": 112, "num_layers": 2, "dtype": "bfloat16"},
        "draft": {**SLIDING, "target_layer_ids": [0, 1, 1]},
        "quantize": {owner: {"algorithm": "NVFP4"} for owner in ("target", "draft")},
    },
    "gpt_oss": {
        "family": "gpt_oss",
        "target": {"vocab": 101, "num_layers": 2, "rope": "yarn", "mxfp4": True},
        "draft": {"target_layer_ids": [0, 1]},
    },
}
GRAPHS: tuple[TargetGraph, ...] = ("target", "target_only")

pytestmark = pytest.mark.covering(1)


@pytest.fixture(scope="module", params=list(PAIR))
def linear(request: pytest.FixtureRequest, make_pair: PairFactory) -> TinyPair:
    return make_pair(**PAIR[request.param], max_batch=SLOTS, max_seq_len=LENGTH)


@pytest.fixture(scope="module")
def baseline(linear: TinyPair) -> Baseline:
    ids = random_ids(linear.pair.target.vocab_size, PROMPT)
    return Baseline(ids, run_chunks(linear.open(), ids.tolist(), (1,), graph="target_only"))


@pytest.fixture(params=[8, 64, 128], ids="pages of {}".format)
def executor(
    request: pytest.FixtureRequest, linear: TinyPair, make_pair: PairFactory
) -> Iterator[OnnxRuntimeExecutor]:
    """Every slot has pages of its own, in no order; all pages start with NaN in every row."""
    arguments = next(
        one for one in PAIR.values() if one["target"]["vocab"] == linear.pair.target.vocab_size
    )
    built = make_pair(
        **arguments,
        max_batch=SLOTS,
        max_seq_len=LENGTH,
        paging={"page_size": request.param},
    )
    opened = built.open()
    poison(opened)
    bind_shuffled(opened)
    yield opened
    opened.close()


def poison(executor: OnnxRuntimeExecutor) -> None:
    """NaN in every page but the one that is nobody's."""
    for pool in pools(executor).values():
        pool[:-1] = np.nan


def bind_shuffled(executor: OnnxRuntimeExecutor, seed: int = 0) -> list[list[int]]:
    pool = executor.limits.page_pool
    assert pool is not None
    ids = list(range(pool.pages))
    random.Random(seed).shuffle(ids)
    each = pool.cover(LENGTH)
    bound = [ids[slot * each : (slot + 1) * each] for slot in range(SLOTS)]
    for slot, page_ids in enumerate(bound):
        executor.bind_pages(slot, page_ids)
    return bound


@pytest.mark.covering(2)
@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("sizes", [(1,), (3,), (8,), (PROMPT,), (127, 2), (7, 1, 64, 2, 33, 1)])
def test_logits_are_the_linear_layouts_for_every_chunking(
    executor: OnnxRuntimeExecutor, baseline: Baseline, graph: TargetGraph, sizes: tuple[int, ...]
) -> None:
    logits = run_chunks(executor, baseline.ids.tolist(), sizes, graph=graph, slot=2)
    assert_bitwise_equal(logits, baseline.logits, f"{graph} in chunks {sizes}")


@pytest.mark.covering(2)
@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("batch", [3, 8])
def test_logits_do_not_depend_on_neighbours_of_other_lengths(
    executor: OnnxRuntimeExecutor, baseline: Baseline, batch: int, rows: int
) -> None:
    baseline.check_among_others(executor, [(29 * slot + 5) % 250 for slot in range(batch)], rows)


def test_speculation_gives_the_linear_layouts_drafts_tokens_and_bits(
    executor: OnnxRuntimeExecutor, linear: TinyPair
) -> None:
    """Drafts too: the drafter's context lies on the same pages."""
    prompts = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8], random_ids(60, 100, seed=3).tolist()]
    blocks = list(range(2, linear.pair.draft.block_size + 1))
    plain, runs = linear.open(), []
    for opened in (executor, linear.open()):
        sequences = [begin(opened, prompt, b, (11, 2)) for b, prompt in enumerate(prompts)]
        speculate_until(opened, sequences, 70, blocks)
        runs.append(sequences)
    for paged, other in zip(*runs, strict=True):
        assert paged.tokens == other.tokens and paged.accepted == other.accepted
        assert_bitwise_equal(np.stack(paged.logits), np.stack(other.logits), "linear")
        tokens, logits = decode_plainly(plain, paged.tokens[: paged.prompt], len(paged.output))
        assert paged.output == tokens
        assert_bitwise_equal(np.stack(paged.logits), logits, "target_only")


def test_a_page_shared_by_two_sequences_is_read_by_both_and_written_by_neither(
    executor: OnnxRuntimeExecutor, baseline: Baseline
) -> None:
    """Full pages of one sequence in another's table; both go on, apart, bit for bit."""
    pool = executor.limits.page_pool
    assert pool is not None
    bound = bind_shuffled(executor, seed=1)
    ids = baseline.ids.tolist()
    shared = PROMPT // pool.page_size
    kept = shared * pool.page_size
    run_chunks(executor, ids, (40,), slot=0)
    before = {name: pool[bound[0][:shared]].copy() for name, pool in pools(executor).items()}
    executor.bind_pages(1, [*bound[0][:shared], *bound[1][shared:]])
    logits = run_chunks(executor, ids[kept:], (5,), slot=1, start=kept)
    assert_bitwise_equal(logits, baseline.logits[kept:], "after the shared pages")
    drafts = [
        executor.speculate(one_step(anchor=5, slot=slot, start=PROMPT)).token_ids.copy()
        for slot in (0, 1)
    ]
    np.testing.assert_array_equal(drafts[0], drafts[1])
    for name, pool in pools(executor).items():
        assert_bitwise_equal(pool[bound[0][:shared]], before[name], name)


def test_moves_and_releases_copy_no_row(executor: OnnxRuntimeExecutor, baseline: Baseline) -> None:
    ids = baseline.ids.tolist()
    first = run_chunks(executor, ids[:90], (64,), slot=5)
    before = {name: pool.copy() for name, pool in pools(executor).items()}
    executor.move_slot(5, 1, 90)
    executor.release_slots(2)
    for name, pool in pools(executor).items():
        np.testing.assert_array_equal(pool, before[name])
    rest = run_chunks(executor, ids[90:], (8,), slot=1, start=90)
    assert_bitwise_equal(np.concatenate([first, rest]), baseline.logits, "moved")
    with pytest.raises(ValueError, match="slot 5 has pages for 0 positions, not 1"):
        forward_rows(executor, [[1]], [0], first_slot=5)


def test_a_slot_bound_to_none_before_forgets_what_it_wrote(
    executor: OnnxRuntimeExecutor, baseline: Baseline
) -> None:
    """The same pages again, which somebody has filled with NaN in between."""
    bound = bind_shuffled(executor, seed=3)
    ids = baseline.ids.tolist()
    run_chunks(executor, ids, (PROMPT,), slot=0)
    poison(executor)
    executor.bind_pages(0, [])
    executor.bind_pages(0, bound[0])
    logits = run_chunks(executor, ids, (33, 1, 8), slot=0)
    assert_bitwise_equal(logits, baseline.logits, "bound again")


def test_writes_stay_on_the_pages_of_their_rows(executor: OnnxRuntimeExecutor) -> None:
    """In place: every other row of every pool keeps its poison, the spare page its zeros."""
    bound = bind_shuffled(executor, seed=2)
    size = pools(executor)["target_k_0"].shape[1]
    run_chunks(executor, random_ids(60, 70).tolist(), (33,), slot=3)
    executor.speculate(one_step(anchor=5, slot=3, start=70))
    written = bound[3][: -(-74 // size)]
    for name, pool in pools(executor).items():
        rest = np.delete(pool, [*written, len(pool) - 1], axis=0)
        assert np.isnan(rest).all(), name
        assert not pool[-1].any(), name
        rows = pool[written].reshape(-1, *pool.shape[2:])
        assert np.isfinite(rows).all() and rows[:70].any(axis=(1, 2)).all(), name


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


def test_a_graph_of_the_other_layout_is_refused(linear: TinyPair, make_pair: PairFactory) -> None:
    """The manifest says linear, the graph says pages, or the other way round."""
    if linear.pair.target.vocab_size != 64:
        pytest.skip("one pair is enough")
    paged = make_pair(**PAIR["qwen3"], max_batch=SLOTS, max_seq_len=LENGTH, paging={})
    for mine, other in ((linear, paged), (paged, linear)):
        opened = mine.open()
        opened._folder = other.bundle.folder
        with pytest.raises(DflashError, match="its caches are not the ones"):
            opened.preload(["target"])

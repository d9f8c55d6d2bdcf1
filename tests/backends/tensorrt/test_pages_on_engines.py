"""Engines that draw over paged FP8 caches: each step ahead brings its own page tables.

A layer of each model sees a window, behind which it gives its pages back.

Blocks of eight over pages of sixteen: nearly every step of a few sequences is one for which some
sequence got a page since the step before was enqueued.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_trt.backends.base import ExecutorLimits
from dflash_trt.backends.device.executor import DeviceExecutor
from dflash_trt.backends.page_bindings import HANDED_BACK
from dflash_trt.decoding import Generator, Request
from dflash_trt.errors import DflashError
from dflash_trt.graph.form import CacheDtype, GraphForm
from dflash_trt.sampling.params import pack_sampling
from tests.backends.steps import forward_rows, one_step, random_ids, run_chunks
from tests.backends.tensorrt.drawing import (
    ENDS,
    GREEDY,
    SAMPLED,
    Decoding,
    Patient,
    play,
    write_graphs,
)
from tests.backends.tensorrt.machine import Machine, make_machine, run_alone
from tests.pairs import TWO_KINDS, PairFactory, TinyPair
from tests.standins.cuda import FakeCuda

LENGTH, SIZE, BLOCK, SLOTS, VOCAB = 112, 16, 8, 4, 64
PAGES = 12
WINDOWS = (24, 40)
"""The draft's and the target's."""
PAIR: dict[str, Any] = {
    "family": "qwen2",
    "target": {"vocab": VOCAB, "num_layers": 2, "window": WINDOWS[1]},
    "draft": {"block_size": BLOCK, "num_layers": 2, "target_layer_ids": [0, 1], **TWO_KINDS},
    "fit_steps": 60,
    "max_seq_len": LENGTH,
    "max_batch": SLOTS,
    "prefill_chunk": 16,
    "paging": {"page_size": SIZE, "pages": PAGES},
    "kv_dtype": "fp8",
}


@pytest.fixture(scope="module")
def built(make_pair: PairFactory) -> TinyPair:
    return make_pair(**PAIR)


@pytest.fixture(scope="module")
def graphs(built: TinyPair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pair's graphs in the form that draws, over the same pages and rounding."""
    windows = built.bundle.manifest.graph_form.windows
    assert windows == WINDOWS
    form = GraphForm(draws=True, page_size=SIZE, cache_dtype=CacheDtype.FP8, windows=windows)
    return write_graphs(built, tmp_path_factory.mktemp("drawing") / "bundle", form)


@pytest.fixture
def machine(built: TinyPair, graphs: Path, tmp_path: Path) -> Machine:
    """Pages for nearly two of the four sequences that may run."""
    return make_machine(built, tmp_path, "tensorrt", graphs, draws=True)


def pools(machine: Machine, executor: DeviceExecutor) -> dict[str, np.ndarray]:
    """The pools themselves, once the device has done what it was told."""
    machine.cuda.run()
    return machine.caches(executor)


def make_request(rng: random.Random, limits: ExecutorLimits) -> Request:
    """Of outputs that take a while; two of three begin alike, a page or two."""
    head = range(2, 2 + rng.choice([0, SIZE, 2 * SIZE]))
    return Request(
        prompt_ids=(*head, *rng.choices(range(VOCAB - 1), k=rng.choice([1, 3, 9]))),
        max_tokens=rng.choice([3, 40, None]),
        sampling=rng.choice([GREEDY, GREEDY, replace(SAMPLED, seed=rng.randrange(2**64))]),
        ignore_eos=rng.random() < 0.8,
        speculate=rng.random() < 0.95,
        block_size=4 if rng.random() < 0.1 else None,
    )


def test_random_traffic_is_the_cpus_and_that_without_looking_ahead(
    machine: Machine, built: TinyPair
) -> None:
    """Preempted, shared, cancelled, moved; drawn and greedy."""
    patient, eager = machine.open(), machine.open()
    preempted = hits = cancelled = 0
    for seed in (0, 1, 5):
        expected, got = (
            play(one, seed, turns=70, make=make_request) for one in (Patient(patient), eager)
        )
        assert got.events == expected.events, f"seed {seed}"
        ended = sorted(got.results)
        asked = [got.requests[number] for number in ended]
        alone = run_alone(built, asked, eos_token_ids=ENDS)
        for number, want in zip(ended, [one.token_ids for one in alone], strict=True):
            result = got.results[number]
            assert result.token_ids == want[: len(result.token_ids)], f"seed {seed}: {number}"
            if result.finish_reason != "cancelled":
                assert len(result.token_ids) == len(want)
            cancelled += result.finish_reason == "cancelled"
            preempted += result.statistics.preemptions or 0
            hits += bool(result.statistics.cached_prompt_tokens)
    assert preempted and hits and cancelled
    assert patient.lookahead.started == 0 < eager.lookahead.dropped < eager.lookahead.started
    assert eager.runner.capture_error is None
    assert not machine.trt.shape_changes
    for one in (patient, eager):
        one.close()
    assert machine.cuda.is_clean


def give_pages(
    executor: DeviceExecutor,
    first_slot: int,
    ends: Sequence[int],
    starts: Sequence[int] = (0, 0),
) -> list[int]:
    """Pages up to `ends`, by sequence; how many each has. No two in a row are neighbours.

    Layers with a window have those that rows from `starts` on see, in turn.
    """
    counts = [-(-end // SIZE) for end in ends]
    for index, (count, start) in enumerate(zip(counts, starts, strict=True)):
        pages = [PAGES - 1 - 2 * column - index for column in range(count)]
        executor.bind_pages(first_slot + index, pages)
        for window in WINDOWS:
            passed = max(0, start - window + 1) // SIZE
            seen = [2 * (column % (PAGES // 2)) + index for column in range(passed, count)]
            executor.bind_pages(first_slot + index, [HANDED_BACK] * passed + seen, window)
    return counts


def begin(executor: DeviceExecutor, first_slot: int, *, pages: int) -> Decoding:
    give_pages(executor, first_slot, [pages * SIZE] * 2)
    return Decoding.begin(executor, GREEDY, SAMPLED, first_slot=first_slot)


@pytest.mark.parametrize("first_slot", [0, 2])
def test_a_chain_goes_on_across_pages(machine: Machine, first_slot: int) -> None:
    """Pages come one by one, each while a step is under way that was begun without it."""
    most = PAGES // 2
    other = begin(machine.open(), first_slot, pages=most)
    expected = []
    while other.starts.max() + 2 * BLOCK <= most * SIZE:
        expected.append(other.step(ahead=False))
    executor, cuda = machine.open(), machine.cuda
    chain = begin(executor, first_slot, pages=1)
    counts, bound_meanwhile = [0, 0], 0
    for number, tokens in enumerate(expected):
        before, ends = counts, [start + 2 * BLOCK for start in chain.starts.tolist()]
        counts = give_pages(executor, first_slot, ends, chain.starts.tolist())
        bound_meanwhile += bool(cuda.queue) and counts != before
        copies = cuda.copies
        assert chain.step(ahead=True) == tokens
        if number > 2:
            assert cuda.copies - copies == 4, "ids, starts, the tables, the results"
        assert executor.lookahead.started == max(0, number - 1) and executor.lookahead.dropped == 0
        assert bool(cuda.queue) == (number > 1), "the step begun is under way"
    assert bound_meanwhile > 1 and chain.starts.max() >= WINDOWS[0] + SIZE, "some handed back"


OWN, SEEN = [PAGES - 1, PAGES - 3, PAGES - 5], [0, 2, 4]
"""The first sequence's pages, of layers without a window and of one with it."""
REBOUND: dict[str, tuple[Callable[[list[int]], list[list[int]]], bool]] = {
    "as it was": (lambda pages: [pages], False),
    "one more": (lambda pages: [[*pages, 0]], False),
    "one less": (lambda pages: [pages[:-1]], True),
    "another": (lambda pages: [[0, *pages[1:]]], True),
    "the last another": (lambda pages: [[*pages[:-1], 0]], True),
    "taken and given back": (lambda pages: [[], pages], True),
    "handed back": (lambda pages: [[HANDED_BACK, *pages[1:]]], False),
}
CHANGES = [
    *(pytest.param(change, None, id=change) for change in REBOUND if change != "handed back"),
    *(
        pytest.param(change, WINDOWS[0], id=f"{change}, of a window")
        for change in ("handed back", "one more", "the last another")
    ),
]


@pytest.mark.parametrize(("change", "window"), CHANGES)
def test_a_step_is_dropped_whose_rows_are_on_other_pages(
    machine: Machine, change: str, window: int | None
) -> None:
    executor = machine.open()
    decoding = begin(executor, 0, pages=3)
    for _ in range(3):
        decoding.step(ahead=True)
    assert executor.lookahead.started == 1 and machine.cuda.queue
    rebind, dropped = REBOUND[change]
    for pages in rebind(OWN if window is None else SEEN):
        executor.bind_pages(0, pages, window)
    assert executor.lookahead.dropped == dropped


def test_a_shared_prefix_changes_neither_tokens_nor_acceptance(
    machine: Machine, built: TinyPair
) -> None:
    """The same acceptance as without it: the drafter's context comes along."""
    system = (3, 1, 4, 1, 5, 9, 2, 6) * 4  # what the draft was fitted on
    requests = [
        Request(prompt_ids=(*system, *tail), max_tokens=30, ignore_eos=True)
        for tail in ((), (7,), (8, 9, 11))
    ]
    executor, hits = machine.open(), []
    generator = Generator(executor)
    for request, want in zip(requests, run_alone(built, requests), strict=True):
        (got,) = generator.generate([request])
        assert got.token_ids == want.token_ids
        hits.append(got.statistics.cached_prompt_tokens)
        assert got.statistics.acceptance_histogram == want.statistics.acceptance_histogram
    assert hits[0] == 0 < min(hits[1:])


def test_slots_are_moved_and_released(machine: Machine) -> None:
    """Pages move, rows do not; pools are bound whole, so that one binding serves every slot."""
    executor, ids = machine.open(), random_ids(VOCAB, 12).tolist()
    give_pages(executor, 2, [2 * SIZE], [0])
    run_chunks(executor, ids, (6,), slot=2)
    rows = forward_rows(executor, [ids[-2:]], [10], first_slot=2)
    before = {name: pool.copy() for name, pool in pools(machine, executor).items()}
    executor.move_slot(2, 0, 10)
    executor.release_slots(1)
    for name, pool in pools(machine, executor).items():
        np.testing.assert_array_equal(pool, before[name])
    np.testing.assert_array_equal(forward_rows(executor, [ids[-2:]], [10]), rows)
    with pytest.raises(ValueError, match="slot 2 has pages for 0 positions, not 1"):
        forward_rows(executor, [[1]], [0], first_slot=2)
    give_pages(executor, 0, [SIZE] * SLOTS, [0] * SLOTS)
    sampling = pack_sampling([GREEDY])
    for slot in (0, 0, 2, 3):
        executor.speculate(replace(one_step(anchor=3, slot=slot), sampling=sampling))
    assert executor.runner.captured == 1 and machine.cuda.launches == 2


def test_writes_stay_on_the_pages_of_their_rows(machine: Machine) -> None:
    executor = machine.open()
    for pool in pools(machine, executor).values():
        assert not pool[-1].any(), "the page that is nobody's is zero"
        pool[:-1] = np.nan
    for window in (None, *WINDOWS):
        executor.bind_pages(3, [7, 2, 11], window)
    run_chunks(executor, random_ids(VOCAB, 33).tolist(), (8, 5), slot=3)
    sampling = pack_sampling([GREEDY])
    executor.speculate(replace(one_step(8, anchor=5, slot=3, start=33), sampling=sampling))
    for name, pool in pools(machine, executor).items():
        rest = np.delete(pool, [7, 2, 11, len(pool) - 1], axis=0)
        assert np.isnan(rest).all() and not pool[-1].any(), name
        rows = pool[[7, 2, 11]].reshape(-1, *pool.shape[2:])
        # The last chunk ran from 28 to 44: eleven idle rows lie behind its own five.
        assert np.isfinite(rows[:44]).all() and np.isnan(rows[44:]).all(), name


@pytest.mark.parametrize(
    ("pages", "message"),
    [
        (1 << 20, r"paged caches \(1048576 pages of 16 .* do not fit .* fewer --kv-pages"),
        (1 << 70, "do not fit .* fewer --kv-pages"),
        (25, r"target_k_0 has shape \[13, 16, 2, 16\], the manifest says \[26, 16"),
    ],
)
def test_other_pools_are_refused(machine: Machine, pages: int, message: str) -> None:
    """That do not fit, before any of it is allocated; that the engines do not have."""
    machine.cuda = machine.trt.cuda = FakeCuda()
    pool = machine.bundle.limits.page_pool
    assert pool is not None
    limits = replace(machine.bundle.limits, page_pool=replace(pool, pages=pages))
    form = machine.bundle.form.with_pages(limits.page_pool)
    machine.bundle = replace(machine.bundle, limits=limits, form=form)
    with pytest.raises(DflashError, match=message) as caught:
        machine.open().preload(("target",))
    assert "\n" not in caught.value.message

"""Pools of pages on a device, over stand-ins that compute: the linear caches' tokens.

The stand-in's engines are a CPU bundle's paged graphs. It reads and writes pools as the kernels
do (see HeldPages): rows that a sequence does not hold may be NaN, as they are here.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_trt.backends.tensorrt.run.executor import TensorRtExecutor
from dflash_trt.core.limits import PagePool
from dflash_trt.decoding import Generator, Request
from dflash_trt.errors import DflashError
from tests.backends.steps import forward_rows, one_step, random_ids, run_chunks
from tests.backends.tensorrt.machine import Machine, engine_form, make_machine, run_alone
from tests.pairs import TWO_KINDS, PairFactory, TinyPair
from tests.standins.cuda import FakeCuda

LENGTH, SIZE, SLOTS, VOCAB = 128, 8, 4, 64
WHOLE = LENGTH // SIZE
PAIR: dict[str, Any] = {
    "target": {"vocab": VOCAB, "num_layers": 4},
    "draft": {**TWO_KINDS, "target_layer_ids": [0, 1, 3]},
    "fit_steps": 150,
    "max_seq_len": LENGTH,
    "max_batch": SLOTS,
}


@pytest.fixture(scope="module")
def linear(make_pair: PairFactory) -> TinyPair:
    return make_pair(**PAIR)


@pytest.fixture
def machine(make_pair: PairFactory, tmp_path: Path) -> Machine:
    """A pool that holds one sequence and a half of the four that may run."""
    built = make_pair(**PAIR, paging={"page_size": SIZE, "pages": WHOLE * 3 // 2})
    return make_machine(built, tmp_path, "tensorrt", built.bundle.folder)


def pools(machine: Machine, executor: TensorRtExecutor) -> dict[str, np.ndarray]:
    """The pools themselves, once the device has done what it was told."""
    machine.cuda.run()
    return machine.caches(executor)


def test_a_shared_prefix_changes_neither_tokens_nor_acceptance(
    machine: Machine, linear: TinyPair
) -> None:
    """The same acceptance as without it: the drafter's context comes along."""
    rng = random.Random(4)
    system = [3, 1, 4, 1, 5, 9, 2, 6] * 5  # what the draft was fitted on
    tails = [[rng.randrange(2, VOCAB) for _ in range(length)] for length in (1, 3, 9)]
    requests = [
        Request(prompt_ids=tuple(system + tail), max_tokens=30, ignore_eos=True)
        for tail in ([], *tails)
    ]
    executor = machine.open()
    generator = Generator(executor)
    hits = []
    for request, want in zip(requests, run_alone(linear, requests), strict=True):
        (got,) = generator.generate([request])
        assert got.token_ids == want.token_ids
        hits.append(got.statistics.cached_prompt_tokens)
        for name in ("acceptance_length", "acceptance_histogram", "conditional_acceptance"):
            assert getattr(got.statistics, name) == getattr(want.statistics, name)
    assert hits == [0, 40, 40, 40]
    # And it would be noticed: without the drafter's rows fewer are accepted.
    for name, pool in pools(machine, executor).items():
        if name.startswith("draft_"):
            pool[...] = 0
    (starved,) = generator.generate(requests[:1])
    (whole,) = run_alone(linear, requests[:1])
    assert starved.statistics.cached_prompt_tokens == 32
    assert starved.token_ids == whole.token_ids
    assert starved.statistics.acceptance_histogram != whole.statistics.acceptance_histogram


def test_one_binding_serves_every_slot(machine: Machine) -> None:
    """Pools are bound whole: what was captured for one slot replays for another."""
    executor = machine.open()
    for slot in range(SLOTS):
        executor.bind_pages(slot, [slot])
    for slot in (0, 0, 2, 3):
        executor.speculate(one_step(anchor=3, slot=slot))
    assert executor.runner.captured == 1 and machine.cuda.launches == 2


def test_slots_are_moved_and_released(machine: Machine) -> None:
    executor = machine.open()
    ids = random_ids(VOCAB, 12).tolist()
    executor.bind_pages(2, [5, 9])
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


def test_writes_stay_on_the_pages_of_their_rows(machine: Machine) -> None:
    executor = machine.open()
    for pool in pools(machine, executor).values():
        assert not pool[-1].any(), "the page that is nobody's is zero"
        pool[:-1] = np.nan
    executor.bind_pages(3, [7, 2, 11])
    run_chunks(executor, random_ids(VOCAB, 13).tolist(), (6,), slot=3)
    executor.speculate(one_step(anchor=5, slot=3, start=13))
    for name, pool in pools(machine, executor).items():
        rest = np.delete(pool, [7, 2, 11, len(pool) - 1], axis=0)
        assert np.isnan(rest).all() and not pool[-1].any(), name
        rows = pool[[7, 2, 11]].reshape(-1, *pool.shape[2:])
        # The second chunk ran from 6 to 22: ten idle rows lie behind its own six.
        assert np.isfinite(rows[:22]).all() and np.isnan(rows[22:]).all(), name


def say_pool(machine: Machine, pool: PagePool | None) -> None:
    """Lets the manifest say that the engines have another pool."""
    limits, length = (
        replace(machine.bundle.limits, page_pool=pool),
        machine.bundle.form.cache_length,
    )
    assert length is not None
    machine.bundle = replace(machine.bundle, limits=limits, form=engine_form(length, limits))


@pytest.mark.parametrize("pages", [1 << 20, 1 << 70])
def test_pools_that_do_not_fit_are_refused(machine: Machine, pages: int) -> None:
    """Before any of it is allocated."""
    machine.cuda = machine.trt.cuda = FakeCuda()
    say_pool(machine, PagePool(SIZE, pages))
    with pytest.raises(
        DflashError, match=rf"paged caches \({pages} pages of 8 .* do not fit .* fewer --kv-pages"
    ) as caught:
        machine.open()
    assert "\n" not in caught.value.message and not machine.cuda.memory


@pytest.mark.parametrize(
    ("pool", "message"),
    [
        (PagePool(16, 24), r"page_table has shape \[-1, 16\], the manifest says \[-1, 8\]"),
        (PagePool(8, 25), r"target_k_0 has shape \[25, 8, 2, 16\], the manifest says \[26, 8"),
        (None, "its tensors differ in page_table"),
    ],
)
def test_an_engine_of_other_pages_is_refused(
    machine: Machine, pool: PagePool | None, message: str
) -> None:
    say_pool(machine, pool)
    with pytest.raises(DflashError, match=message):
        machine.open().preload(("target",))

"""What the benchmarks by replay count, on cases that are known beforehand."""

from __future__ import annotations

import numpy as np
import pytest
from dflash_perf.bench.cut_speed import CuttingExecutor, LogisticReach
from dflash_perf.bench.markov_head import KEPT, FittedHead, Seen, recall
from dflash_perf.bench.row_cuts import Chain, ReachCalibration, simulate
from dflash_perf.bench.served_demo import read_named_bundles
from dflash_perf.bench.two_checkouts import interval

from dflash_trt.errors import DflashError
from dflash_trt.replay.anchors import mean_tau, walk_loop
from tests.lossless.runs import assert_same, make_requests, run, run_baseline
from tests.pairs import TWO_KINDS, PairFactory


def test_a_markov_head_learns_what_follows_what() -> None:
    """The token behind t is t + 1, and the draft's logits do not say so."""
    chance = np.random.default_rng(2)

    def see() -> Seen:
        before = chance.integers(0, KEPT, (40, 3))
        ids = np.broadcast_to(np.arange(KEPT), (40, 3, KEPT)).copy()
        logits = chance.normal(size=ids.shape).astype(np.float32)
        return Seen(before, ids, logits, (before + 1) % KEPT)

    answers = [see() for _ in range(30)]
    other = see()
    assert (other.logits.argmax(axis=2) == other.wanted).mean() < 0.2
    right = FittedHead(answers, KEPT, 8).right(other)
    assert right.mean() > 0.9
    assert mean_tau([walk_loop(right)]) > 3
    lost = Seen(other.before, other.ids, other.logits, np.array([[0, -1, 2]] * 40))
    assert recall([lost]) == [1.0, 0.0, 0.0]


def test_a_simulation_counts_tokens_and_seconds() -> None:
    chain = Chain(products=np.full((8, 3), 0.5), right=np.array([3, 2, 1, 0] * 2))
    # One sequence, three rows a step: anchors 0, 3, 4, 7, twice over.
    rate = simulate([chain], 1, lambda products, right: 3, lambda rows: 0.5)
    assert rate == pytest.approx(2 * 8 / (2 * 4 * 0.5))
    chances = ReachCalibration([chain]).chances(np.full((2, 3), 0.5))
    np.testing.assert_allclose(chances, [[6 / 8, 4 / 8, 2 / 8]] * 2)


def test_a_boastful_draft_is_set_right() -> None:
    """Slots are right with half the odds that the draft gives them, each apart from the others."""
    rng = np.random.default_rng(3)
    told = rng.uniform(0.3, 0.99, (4000, 3)).astype(np.float32)
    odds = 0.5 * told / (1 - told)
    actual = odds / (1 + odds)
    good = np.cumprod(rng.random(told.shape) < actual, axis=1).sum(axis=1)
    found = LogisticReach(list(zip(told, good.tolist(), strict=True))).reach(told)
    assert np.abs(found[:, 0] - actual[:, 0]).mean() < 0.03
    assert np.abs(found - np.cumprod(actual, axis=1)).mean() < 0.05
    assert (np.diff(found, axis=1) <= 0).all()


def test_cut_steps_keep_every_bit(make_pair: PairFactory) -> None:
    """Whatever is cut; the log has what came of the rows that were verified."""
    pair = make_pair("qwen3", {"vocab": 64}, TWO_KINDS, fit_steps=60, max_batch=8)
    requests, rng = make_requests(64, 3), np.random.default_rng(1)
    executor = CuttingExecutor(pair.bundle)
    expected = run_baseline(executor, requests)
    executor.choose = lambda chances: int(rng.integers(2, chances.shape[1] + 2))
    results = run(executor, requests)
    for want, got in zip(expected, results, strict=True):
        assert_same(want, got, "cut")
    chances = np.array([told for told, _ in executor.log])
    assert chances.shape[1] == 7 and ((chances > 0) & (chances <= 1)).all()
    assert sum(good for _, good in executor.log) >= sum(
        one.statistics.accepted_tokens for one in results
    )
    assert len(executor.log) == sum(one.statistics.steps for one in results)


def test_the_interval_of_a_median() -> None:
    assert interval([1.0] * 15) == (1.0, 1.0)
    low, high = interval([0.9, 1.0, 1.1] * 5)
    assert 0.9 <= low < 1.0 < high <= 1.1


def test_bundles_are_named() -> None:
    for text in ("x", "=a", "a=", ""):
        with pytest.raises(DflashError, match="is not one NAME=BUNDLE"):
            read_named_bundles([text], None)

"""What the benchmarks by replay count, on cases that are known beforehand."""

from __future__ import annotations

import numpy as np
import pytest
from dflash_perf.bench.markov_head import KEPT, FittedHead, Seen, recall
from dflash_perf.bench.row_cuts import Chain, ReachCalibration, simulate
from dflash_perf.bench.served_demo import read_named_bundles
from dflash_perf.bench.two_checkouts import interval

from dflash_trt.errors import DflashError
from dflash_trt.replay.anchors import mean_tau, walk_loop


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


def test_the_interval_of_a_median() -> None:
    assert interval([1.0] * 15) == (1.0, 1.0)
    low, high = interval([0.9, 1.0, 1.1] * 5)
    assert 0.9 <= low < 1.0 < high <= 1.1


def test_bundles_are_named() -> None:
    for text in ("x", "=a", "a=", ""):
        with pytest.raises(DflashError, match="is not one NAME=BUNDLE"):
            read_named_bundles([text], None)

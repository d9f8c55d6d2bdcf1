"""Which differences count: a noise-aware rule, held to made-up answers."""

from __future__ import annotations

import numpy as np
import pytest

from dflash_trt.decoding.statistics import RequestStatistics
from dflash_trt.proof.diagnosis.gain import (
    FEWEST,
    Counts,
    count,
    group_gain,
    length_interval,
    paired_gain,
)


def answers(steps: object) -> Counts:
    """Answers of 120 tokens in so many steps each."""
    taken = np.asarray(steps, np.float64)
    return np.stack([np.full(len(taken), 120.0), taken])


NOISY = np.array([20, 28, 35, 22, 31, 25, 19, 40, 27, 33, 24, 30])


def test_a_gain_of_every_answer_is_one() -> None:
    gain = paired_gain(answers(NOISY), answers(NOISY / 1.06))
    assert gain.value == pytest.approx(0.06) and gain.is_gain and not gain.is_loss
    assert gain.low == pytest.approx(0.06) and gain.high == pytest.approx(0.06)
    assert paired_gain(answers(NOISY / 1.06), answers(NOISY)).is_loss


def test_pairing_sees_what_groups_cannot() -> None:
    """The answers differ by far more than the change makes of each."""
    changed = answers(NOISY / 1.06)
    assert paired_gain(answers(NOISY), changed).is_gain
    assert not group_gain(answers(NOISY), changed).is_gain
    assert group_gain(answers(NOISY * 3), changed).is_gain


def test_what_is_small_or_chance_is_none() -> None:
    assert not paired_gain(answers(NOISY), answers(NOISY / 1.02)).is_gain
    # One answer alone gains: 9 % in all, and gone in a draw without it.
    one = NOISY.astype(float)
    one[7] /= 4
    gain = paired_gain(answers(NOISY), answers(one))
    assert gain.value > 0.08 and not gain.is_gain
    # 5 % of little: 1.05 tokens a step instead of 1.
    low = paired_gain(answers(np.full(12, 120)), answers(np.full(12, 114)))
    assert low.value > 0.05 and low.tokens < 0.1 and not low.is_gain


def test_few_answers_prove_nothing() -> None:
    few = NOISY[: FEWEST - 1]
    gain = paired_gain(answers(few), answers(few / 2))
    assert gain.value == pytest.approx(1) and not gain.is_known and not gain.is_gain
    nothing = np.zeros((2, 0))
    assert not paired_gain(nothing, nothing).is_known
    assert length_interval(nothing) == (0.0, 0.0)
    with pytest.raises(ValueError, match="not paired"):
        paired_gain(answers(NOISY), answers(few))


def test_noise_is_seldom_blamed() -> None:
    """Of 60 changes that do nothing but reshuffle steps, hardly one is called a gain."""
    generator = np.random.default_rng(0)
    blamed = sum(
        paired_gain(
            answers(np.maximum(generator.poisson(30, 12), 15)),
            answers(np.maximum(generator.poisson(30, 12), 15)),
        ).is_gain
        for _ in range(60)
    )
    assert blamed <= 2


def test_intervals_and_shares() -> None:
    low, high = length_interval(answers(NOISY))
    assert low < 120 * 12 / NOISY.sum() < high
    settled = np.full(8, 10.0)
    never, often = np.stack([np.zeros(8), settled]), np.stack([np.full(8, 5.0), settled])
    assert paired_gain(never, often).is_gain, "a share of nothing is no division by zero"
    now_and_then = np.stack([np.array([9.0, 1.0] * 4), settled])
    assert not paired_gain(often, now_and_then).is_gain


def test_answers_without_a_step_do_not_count() -> None:
    none = RequestStatistics(prompt_tokens=3, output_tokens=1)
    some = RequestStatistics(
        prompt_tokens=3, output_tokens=6, steps=2, acceptance_histogram=(0, 1, 1)
    )
    assert count([none, some]).tolist() == [[5], [2]]

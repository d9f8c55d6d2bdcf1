"""What counts as a gain, and what is concluded from evidence that means one thing each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dflash_trt.decoding.replay.replayed_acceptance import Acceptance, Answer, StepTable, summarise
from dflash_trt.decoding.statistics import StatisticsRecorder
from dflash_trt.proof.diagnosis.cause import Cause
from dflash_trt.proof.diagnosis.evidence import Evidence, Group, compare_groups, compare_slots
from dflash_trt.proof.diagnosis.gain import Gain, length_interval, measure_gain
from dflash_trt.proof.diagnosis.trial import Trial
from dflash_trt.proof.diagnosis.verdict import VerdictKind, judge

S = 5
ANSWERS = 8


def made_up(
    accepts: tuple[int, ...], *, ranks: tuple[int, ...] = (0, 0, 0, 0), shift: int = 0
) -> tuple[Acceptance, StepTable]:
    """8 answers, whose steps accept `accepts` drafts in turn.

    `ranks` are the answer's tokens' behind the first rejection; the draft of slot j is the
    token `shift` places behind its own.
    """
    rows, counts, answers = [], [], []
    for number in range(ANSWERS):
        recorder, position = StatisticsRecorder(0.0), 10
        for accepted in accepts:
            trials, _ = recorder.record_step(S, accepted + 1, accepted + 1)
            tokens = [100 + position + slot for slot in range(S)]
            drafts = [
                tokens[slot] if slot < accepted else 100 + position + slot + shift if shift else 7
                for slot in range(S - 1)
            ]
            rank = [0 if slot < accepted else max(ranks[slot], 1) for slot in range(S - 1)]
            rows.append(
                {
                    "answer": number,
                    "position": position,
                    "trials": trials,
                    "accepted": accepted,
                    "emitted": accepted + 1,
                    "known": 100,
                    "draft_ids": drafts,
                    "token_ids": tokens,
                    "rank": rank,
                    "probability": [0.5] * (S - 1),
                }
            )
            position += accepted + 1
        name = "first" if number < ANSWERS // 2 else "second"
        answers.append(Answer([1] * 10, [2] * (position - 9), set_name=name))
        counts.append(recorder.freeze(10, position - 9))
    table = StepTable.join(rows, S)
    return summarise(answers, counts, table), table


def gain(value: float, spread: float = 0.01) -> Gain:
    return Gain(value, value - spread, value + spread, value * 3, True)


def trial(cause: Cause, value: float, spread: float = 0.01) -> Trial:
    return Trial(cause, f"another {cause.title}", 3.0, gain(value, spread), ANSWERS)


def evidence(accepts: tuple[int, ...] = (4, 4, 3, 4), **more: Any) -> Evidence:
    base, table = made_up(accepts)
    context = trial(Cause.DRAFT_WEIGHTS, -0.7)
    return Evidence(base, compare_slots(table), more.pop("trials", []), context, **more)


NOISY = np.array([20, 28, 35, 22, 31, 25, 19, 40, 27, 33, 24, 30])
ONE_GAINS = np.where(np.arange(12) == 7, NOISY / 4, NOISY)
EIGHT = np.full(8, 10.0)


@pytest.mark.parametrize(
    ("before", "after", "paired", "is_gain"),
    [
        (NOISY, NOISY / 1.06, True, True),
        (NOISY / 1.06, NOISY, True, False),
        # The answers differ by far more than the change makes of each: only pairs tell.
        (NOISY, NOISY / 1.06, False, False),
        (NOISY * 3, NOISY / 1.06, False, True),
        (NOISY, NOISY / 1.02, True, False),
        # 9 % in all, and gone in a draw without that answer.
        (NOISY, ONE_GAINS, True, False),
        # 5 % of little: 1.05 tokens a step instead of 1.
        (np.full(12, 120), np.full(12, 114), True, False),
        (NOISY[:5], NOISY[:5] / 2, True, False),
    ],
)
def test_only_what_matters_and_is_no_chance_is_a_gain(
    before: Any, after: Any, paired: bool, is_gain: bool
) -> None:
    """Answers of 120 tokens in so many steps each."""
    counts = [np.stack([np.full(len(one), 120.0), one]) for one in (before, after)]
    found = measure_gain(counts[0], counts[1], paired=paired)
    expected = before.sum() / after.sum() - 1
    assert found.value == pytest.approx(expected) and found.is_gain is is_gain
    low, high = length_interval(counts[0])
    assert low <= 120 * len(before) / before.sum() <= high
    never, often = np.stack([EIGHT * 0, EIGHT]), np.stack([EIGHT / 2, EIGHT])
    assert measure_gain(never, often, paired=True).is_gain, "a share of nothing divides"


def test_a_good_pair_is_told_what_to_expect() -> None:
    verdict = judge(evidence(trials=[trial(Cause.TAPS, -0.2), trial(Cause.ROPE, 0.02)]))
    assert verdict.kind is VerdictKind.HEALTHY and verdict.cause is None
    assert "4.75 tokens a step" in verdict.text


@pytest.mark.parametrize(
    ("accepts", "more", "causes"),
    [
        # The greatest gain is blamed, and shares of it are not.
        (
            (1, 0, 1, 0),
            {
                "trials": [
                    trial(Cause.TAPS, 1.5),
                    trial(Cause.WINDOW, 0.7),
                    trial(Cause.ROPE, 0.3),
                ]
            },
            [Cause.TAPS, Cause.WINDOW],
        ),
        # Answers in another form are others, and may be easier.
        ((4, 3), {"forms": [trial(Cause.TEMPLATE, 0.15)]}, []),
        ((4, 3), {"forms": [trial(Cause.TEMPLATE, 0.5)]}, [Cause.TEMPLATE]),
        # Thinking is blamed before the whole template.
        (
            (4, 3),
            {"forms": [trial(Cause.TEMPLATE, 0.9), trial(Cause.THINKING, 0.9)]},
            [Cause.THINKING],
        ),
        (
            (4, 3),
            {"forms": [trial(Cause.TEMPLATE, 1.4), trial(Cause.THINKING, 0.9)]},
            [Cause.TEMPLATE, Cause.THINKING],
        ),
    ],
)
def test_what_gains_is_blamed(
    accepts: tuple[int, ...], more: dict[str, Any], causes: list[Cause]
) -> None:
    verdict = judge(evidence(accepts, **more))
    assert [finding.cause for finding in verdict.findings] == causes
    assert verdict.kind is (VerdictKind.WRONG if causes else VerdictKind.HEALTHY)


def test_shifted_slots_are_seen_in_what_they_agree_with() -> None:
    base, table = made_up((0, 0, 0, 1), shift=1)
    slots = compare_slots(table)
    assert slots is not None and slots.best_neighbour == 1
    assert slots.agreement[1] == pytest.approx(1) and slots.agreement[0] < 0.1
    assert judge(Evidence(base, slots, [], None)).cause is Cause.SLOTS
    healthy = compare_slots(made_up((4, 4, 4))[1])
    assert healthy is not None and healthy.agreement == {-1: 0, 0: 1, 1: 0}


def test_a_draft_that_does_not_read_features() -> None:
    base, table = made_up((0, 0, 0, 1), ranks=(90, 90, 90, 90))
    stranger = Evidence(base, compare_slots(table), [], trial(Cause.DRAFT_WEIGHTS, -0.01))
    assert judge(stranger).cause is Cause.DRAFT_WEIGHTS
    reads = replace(stranger, others_context=trial(Cause.DRAFT_WEIGHTS, -0.4))
    verdict = judge(reads)
    assert verdict.kind is VerdictKind.NOT_FOUND and "--training-rows" in verdict.text


def test_data_is_blamed_on_sets_and_on_rows_of_the_training() -> None:
    healthy = evidence()
    for value, kind in ((-0.6, VerdictKind.DATA), (-0.3, VerdictKind.HEALTHY)):
        verdict = judge(replace(healthy, groups=[Group("chinese", healthy.base, gain(value))]))
        assert verdict.kind is kind
        assert kind is VerdictKind.HEALTHY or verdict.findings[0].evidence.startswith("chinese")
    for value, kind in ((0.7, VerdictKind.DATA), (0.4, VerdictKind.HEALTHY)):
        rows = Group("rows", healthy.base, gain(value))
        assert judge(replace(healthy, reference=rows)).kind is kind


def test_few_answers_are_said_to_be_few() -> None:
    base, table = made_up((4, 4))
    few = replace(base, per_answer=base.per_answer[:3])
    assert judge(Evidence(few, compare_slots(table), [], None)).kind is VerdictKind.TOO_FEW


def test_sets_are_compared_with_the_rest() -> None:
    base, _ = made_up((2, 3))
    groups = compare_groups(base)
    assert [group.name for group in groups] == ["first", "second"]
    assert groups[0].gain.value == pytest.approx(0) and not groups[0].gain.is_known  # 4 answers
    assert Evidence(base, None, [], None).oracle_length == pytest.approx(5)

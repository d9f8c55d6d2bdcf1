"""What is concluded from evidence, with figures made up to mean one thing each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dflash_trt.decoding.replay.replayed_acceptance import (
    UNKNOWN,
    Acceptance,
    Answer,
    StepTable,
    summarise,
)
from dflash_trt.decoding.statistics import StatisticsRecorder
from dflash_trt.proof.diagnosis.cause import Cause
from dflash_trt.proof.diagnosis.evidence import (
    Evidence,
    Group,
    compare_groups,
    compare_slots,
    oracle_length,
)
from dflash_trt.proof.diagnosis.gain import Gain
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
    return Trial(cause, f"another {cause.value}", 3.0, gain(value, spread), ANSWERS)


def evidence(accepts: tuple[int, ...] = (4, 4, 3, 4), **more: Any) -> Evidence:
    base, table = made_up(accepts, **{key: more.pop(key) for key in ("ranks",) if key in more})
    context = trial(Cause.DRAFT_WEIGHTS, -0.7)
    return Evidence(base, compare_slots(table), more.pop("trials", []), context, **more)


def test_a_good_pair_is_told_what_to_expect() -> None:
    verdict = judge(evidence(trials=[trial(Cause.TAPS, -0.2), trial(Cause.ROPE, 0.02)]))
    assert verdict.kind is VerdictKind.HEALTHY and verdict.cause is None
    assert "4.75 tokens a step" in verdict.text and "More prompts" not in verdict.text
    unsure = judge(evidence(trials=[trial(Cause.TAPS, 0.08, spread=0.1)]))
    assert unsure.kind is VerdictKind.HEALTHY and "another taps" in unsure.text


def test_the_greatest_gain_is_blamed_and_shares_of_it_are_not() -> None:
    trials = [trial(Cause.ROPE, 0.3), trial(Cause.TAPS, 1.5), trial(Cause.WINDOW, 0.7)]
    verdict = judge(evidence((1, 0, 1, 0), trials=sorted(trials, key=lambda one: -one.gain.value)))
    assert verdict.kind is VerdictKind.WRONG
    assert [finding.cause for finding in verdict.findings] == [Cause.TAPS, Cause.WINDOW]
    assert "other layers of the target" in verdict.text
    assert "target_layer_ids" in verdict.findings[0].cause.fix


@pytest.mark.parametrize(("value", "kind"), [(0.15, VerdictKind.HEALTHY), (0.5, VerdictKind.WRONG)])
def test_another_form_has_to_gain_more(value: float, kind: VerdictKind) -> None:
    """Its answers are others, and may be easier."""
    assert judge(evidence(forms=[trial(Cause.TEMPLATE, value)])).kind is kind


def test_thinking_is_blamed_before_the_whole_template() -> None:
    forms = [trial(Cause.TEMPLATE, 0.9), trial(Cause.THINKING, 0.9)]
    assert judge(evidence(forms=forms)).cause is Cause.THINKING
    forms[0] = trial(Cause.TEMPLATE, 1.4)
    assert judge(evidence(forms=forms)).cause is Cause.TEMPLATE


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


def test_recall_without_acceptance_is_a_better_path() -> None:
    """Accepted 1 to 3 of 4, fewer the later the slot, with every token among the 16 likeliest."""
    path = evidence((1, 2, 3, 1), ranks=(3, 3, 3, 3))
    assert path.oracle_length == pytest.approx(5)
    verdict = judge(path)
    assert verdict.kind is VerdictKind.PATH and "5.00 tokens a step" in verdict.findings[0].evidence
    assert judge(evidence((1, 2, 3, 1), ranks=(90, 90, 90, 90))).kind is not VerdictKind.PATH


def test_data_is_blamed_on_sets_and_on_rows_of_the_training() -> None:
    healthy = evidence()
    group = Group("chinese", healthy.base, gain(-0.6))
    verdict = judge(replace(healthy, groups=[group]))
    assert (verdict.kind, verdict.cause) == (VerdictKind.DATA, Cause.DATA)
    assert verdict.findings[0].evidence.startswith("chinese")
    assert (
        judge(replace(healthy, groups=[replace(group, gain=gain(-0.3))])).kind
        is VerdictKind.HEALTHY
    )
    rows = replace(group, name="rows", gain=gain(0.7))
    assert judge(replace(healthy, reference=rows)).kind is VerdictKind.DATA
    near = replace(rows, gain=gain(0.4))
    assert judge(replace(healthy, reference=near)).kind is VerdictKind.HEALTHY


def test_few_answers_are_said_to_be_few() -> None:
    base, table = made_up((4, 4))
    few = replace(base, per_answer=base.per_answer[:3])
    assert judge(Evidence(few, compare_slots(table), [], None)).kind is VerdictKind.TOO_FEW


def test_sets_are_compared_with_the_rest() -> None:
    base, table = made_up((2, 3))
    groups = compare_groups(base)
    assert [group.name for group in groups] == ["first", "second"]
    assert groups[0].gain.value == pytest.approx(0) and not groups[0].gain.is_known  # 4 answers
    assert oracle_length(table) == pytest.approx(5)
    unknown = replace(table, rank=np.full_like(table.rank, UNKNOWN))
    assert oracle_length(unknown) == 1

"""The plan of a training: how many prompts and steps the hours pay for, and what each stage takes.

Rates come from a probe: the first prompts are answered (those answers are kept), their features
computed, a few steps trained, the draft replayed. What the probe saw is kept, so that a run that is
resumed has the same plan.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from dflash_trt.errors import DflashError

DATA_SHARE = 0.35
"""Of the hours, what answers and features may take: more data helps less than more training."""
RESERVE_SHARE = 0.06
"""Of the hours, what is left over for the build, the proof and a machine that slows down."""
REPLAY_SHARE = 0.10
"""Of the training, what measuring may take."""
TRAIN_MARGIN = 0.88
"""Of the seconds that are left, those that steps are planned for."""
MAX_EPOCHS = 40
PROOF_PROMPTS, PROOF_TOKENS, PROOF_PASSES = 4, 48, 4
"""Of the proof at the end: with and without speculation, compared and timed."""
LEAST_STEPS = 20
HELD_OUT_SHARE, LEAST_HELD_OUT = 0.04, 16
"""Of the hours, what answers to held-out prompts may take; and how few of them are no noise."""
LEAST_EVALUATIONS = 4
"""Of a training, however short: else nothing could be chosen from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What the probe measured.

    Args:
        answer_tokens_s: tokens a second that answers grow by.
        capture_tokens_s: tokens a second whose features are computed.
        step_s: seconds of a training step.
        replay_tokens_s: answer tokens a second that are replayed.
        build_s: seconds to build a bundle.
        prompt_tokens, answer_tokens: of a row, on average.
    """

    answer_tokens_s: float
    capture_tokens_s: float
    step_s: float
    replay_tokens_s: float
    build_s: float
    prompt_tokens: float
    answer_tokens: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """A stage: how many of what, the bytes it leaves, its seconds, and how those were estimated."""

    name: str
    amount: str
    bytes: int
    seconds: float
    how: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is going to happen.

    Args:
        rows: prompts to train on, of `available`; `tokens` in them and their answers.
        held_out: prompts to measure on, the first so many of those that are held out.
        steps: of training; `steps_per_epoch` of them see every row once.
        evaluation_steps: after so many the draft is measured.
    """

    hours: float
    rows: int
    tokens: int
    available: int
    held_out: int
    steps: int
    steps_per_epoch: int
    evaluation_steps: int
    stages: tuple[StagePlan, ...]

    @property
    def seconds(self) -> float:
        return sum(stage.seconds for stage in self.stages)

    @property
    def epochs(self) -> float:
        return self.steps / self.steps_per_epoch

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "seconds": self.seconds, "epochs": self.epochs}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanInput:
    """What a plan is made of, beside the rates.

    Args:
        spent: seconds that have passed of the hours.
        given: rows whose answers are known already.
        feature_bytes: of a token; 0 where features are not kept.
        batch_rows: rows of a step.
        rows, steps: where they were given.
        keeps_held_out: whether all held-out prompts are measured on, whatever that takes.
    """

    hours: float
    spent: float
    available: int
    held_out: int
    given: int
    feature_bytes: int
    batch_rows: int
    rows: int | None
    steps: int | None
    keeps_held_out: bool


@dataclass(frozen=True, slots=True)
class Schedule:
    """Steps to train, and after how many of them the draft is measured."""

    steps: int
    steps_per_epoch: int
    evaluation_steps: int


def check_plan(plan: Plan, spent: float) -> None:
    """Refuses a plan that the hours do not pay for.

    Raises:
        DflashError: says how many would do.
    """
    needed = (plan.seconds + spent) / 3600
    if needed > plan.hours:
        raise DflashError(
            f"{plan.hours:g} h are too few on this machine: {plan.rows} prompts and {plan.steps} "
            f"steps would take {_round_up(needed):g} h",
            where="--hours",
            fix="give more, shorten --answer-tokens, or say --rows and --steps yourself",
        )


def _round_up(hours: float) -> float:
    """To a tenth, or to two digits where that is less."""
    scale = 10.0 ** max(1, 1 - math.floor(math.log10(hours)))
    return math.ceil(hours * scale) / scale


def make_plan(rates: Rates, asked: PlanInput) -> Plan:
    """The plan; it may take longer than the hours, see `check_plan`."""
    budget = asked.hours * 3600
    held_out = choose_held_out(rates, asked)
    if asked.rows is None:
        rows = choose_rows(rates, asked, held_out)
    else:
        rows = min(asked.rows, asked.available)
    told = _answer_seconds(rates, max(0, rows + held_out - asked.given))
    tokens = round(rows * (rates.prompt_tokens + rates.answer_tokens))
    captured = tokens / rates.capture_tokens_s
    measured = replay_seconds(rates, held_out)
    finish = measured + rates.build_s + _proof_seconds(rates)
    left = budget - asked.spent - told - captured - finish - RESERVE_SHARE * budget
    schedule = make_schedule(rates, left, rows, asked.batch_rows, measured, asked.steps)
    evaluations = math.ceil(schedule.steps / schedule.evaluation_steps)
    features = tokens * asked.feature_bytes
    stages = (
        StagePlan(
            name="answers",
            amount=f"{round(rows * rates.answer_tokens):,} tokens to {rows:,} prompts, and "
            f"{held_out} held out",
            bytes=round((rows + held_out) * rates.answer_tokens * 6),
            seconds=told,
            how=f"{rates.answer_tokens_s:,.0f} tokens/s over the first prompts"
            if asked.given < asked.available
            else "given",
        ),
        StagePlan(
            name="features",
            amount=f"{tokens:,} tokens",
            bytes=features,
            seconds=captured,
            how=f"{rates.capture_tokens_s:,.0f} tokens/s",
        ),
        StagePlan(
            name="training",
            amount=f"{schedule.steps:,} steps of {asked.batch_rows} rows, "
            f"{schedule.steps / schedule.steps_per_epoch:.1f} epochs",
            bytes=0,
            seconds=schedule.steps * rates.step_s,
            how=f"{rates.step_s:.3f} s a step",
        ),
        StagePlan(
            name="replay",
            amount=f"{evaluations} times, every {schedule.evaluation_steps:,} steps",
            bytes=0,
            seconds=evaluations * measured,
            how=f"{rates.replay_tokens_s:,.0f} tokens/s, {rates.build_s:.1f} s a build",
        ),
        StagePlan(
            name="build and proof",
            amount="the bundle, and its answers bit for bit",
            bytes=0,
            seconds=finish,
            how="the probe's build, replay and answers",
        ),
    )
    return Plan(
        hours=asked.hours,
        rows=rows,
        tokens=tokens,
        available=asked.available,
        held_out=held_out,
        steps=schedule.steps,
        steps_per_epoch=schedule.steps_per_epoch,
        evaluation_steps=schedule.evaluation_steps,
        stages=stages,
    )


def choose_held_out(rates: Rates, asked: PlanInput) -> int:
    """Held-out prompts that their share of the hours can answer; all of those that were given."""
    if asked.keeps_held_out:
        return asked.held_out
    paid = int(HELD_OUT_SHARE * asked.hours * 3600 / _answer_seconds(rates, 1))
    return min(asked.held_out, max(paid, LEAST_HELD_OUT))


def choose_rows(rates: Rates, asked: PlanInput, held_out: int) -> int:
    """Prompts whose answers and features fit into their share of the hours."""
    share = DATA_SHARE * asked.hours * 3600 - _answer_seconds(rates, held_out)
    row_s = (rates.prompt_tokens + rates.answer_tokens) / rates.capture_tokens_s
    if asked.given < asked.available:
        row_s += _answer_seconds(rates, 1)
    return max(min(asked.available, int(share / row_s)), min(asked.available, asked.batch_rows, 8))


def make_schedule(
    rates: Rates, left: float, rows: int, batch_rows: int, measured: float, steps: int | None
) -> Schedule:
    """Steps for the seconds that are `left`, with measurements of `measured` seconds each."""
    per_epoch = max(1, math.ceil(rows / batch_rows))
    every = max(1, math.ceil(measured / (REPLAY_SHARE * per_epoch * rates.step_s)))
    if steps is None:
        paid = TRAIN_MARGIN * left / (rates.step_s + measured / (every * per_epoch))
        steps = max(min(int(paid), MAX_EPOCHS * per_epoch), LEAST_STEPS)
        every = _often_enough(every, steps / per_epoch)
        # The last step is measured anyway: the one before should not be close to it.
        steps = max(steps // (every * per_epoch), 1) * every * per_epoch
    every = _often_enough(every, steps / per_epoch)
    return Schedule(steps, per_epoch, min(every * per_epoch, steps))


def _often_enough(every: int, epochs: float) -> int:
    """Epochs between measurements: `every`, or fewer where there would be too few of them."""
    return min(every, max(1, int(epochs / LEAST_EVALUATIONS)))


def replay_seconds(rates: Rates, held_out: int) -> float:
    """What one measurement takes: a build and a replay."""
    return rates.build_s + held_out * rates.answer_tokens / rates.replay_tokens_s


def _answer_seconds(rates: Rates, rows: int) -> float:
    return rows * rates.answer_tokens / rates.answer_tokens_s


def _proof_seconds(rates: Rates) -> float:
    """One sequence at a time, which takes about twice as long as in a batch."""
    return 2 * PROOF_PASSES * PROOF_PROMPTS * PROOF_TOKENS / rates.answer_tokens_s

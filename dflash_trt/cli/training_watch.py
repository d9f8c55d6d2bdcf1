"""What `train-draft` shows: the plan, progress with the time left, measurements and the result."""

from __future__ import annotations

from dataclasses import asdict
from importlib.util import find_spec
from statistics import median
from typing import TYPE_CHECKING, Any

import click

from dflash_trt.cli.bars import StageBars
from dflash_trt.errors import one_line, printable
from dflash_trt.training.hours_plan import REST_SHARE

if TYPE_CHECKING:
    from dflash_trt.training.finish import TrainedPair
    from dflash_trt.training.hours_plan import Plan
    from dflash_trt.training.observer import Evaluation, TrainedDraft, WrittenPrompts

_SHOWN_SLOTS = 7
_SHOWN_PROMPTS = 3


class TerminalWatch(StageBars):
    """Bars on stderr; what is to be read stays: on stdout, or on stderr where that is JSON's.

    `name` is the draft's, for the page with curves.
    """

    def __init__(self, name: str, *, as_json: bool) -> None:
        super().__init__()
        self._name = name
        self._as_json = as_json
        self._plan: Plan | None = None
        self._chosen: dict[str, str] = {}
        self._warnings: list[str] = []
        self._written: WrittenPrompts | None = None

    def say(self, line: str) -> None:
        self.pause()
        click.echo(line, err=self._as_json)

    def warn(self, line: str) -> None:
        self._warnings.append(line)
        self.pause()
        click.echo(f"warning: {line}", err=True)

    def show_written(self, written: WrittenPrompts) -> None:
        self._written = written
        left_out = ", ".join(f"{count:,} {why}" for why, count in written.left_out.items())
        self.say(
            f"the target wrote {len(written.texts):,} prompts, {written.second_turns:,} of them "
            f"second messages, {median(written.lengths):.0f} tokens at the median; left out: "
            f"{left_out or 'none'}"
        )
        for text in written.texts[:_SHOWN_PROMPTS]:
            self.say(f"  {one_line(printable(text), 90)}")

    def show_plan(self, plan: Plan, chosen: dict[str, str]) -> None:
        self._plan, self._chosen = plan, chosen
        rates, hours = plan.rates, plan.hours * 3600
        self.say(f"plan for {plan.hours:g} h:")
        lines = [
            f"answers and features: {plan.rows:,} of {plan.available:,} prompts, and "
            f"{plan.held_out} held out",
            f"training: {plan.steps:,} steps, {plan.epochs:.1f} epochs, measured every "
            f"{plan.evaluation_steps:,} steps",
        ]
        if rates is not None:
            rows = (plan.rows + plan.held_out) * rates.row_s
            lines[0] += f"; {_minutes(rows)}, {rates.row_s:.2f} s each"
            lines[1] += f"; {_minutes(plan.steps * rates.step_s)}, {rates.step_s:.3f} s each"
            lines.append(f"measurements, build and proof: up to {_minutes(REST_SHARE * hours)}")
        for line in (*lines, *(f"{name}: {value}" for name, value in chosen.items())):
            self.say(f"  {line}")

    def show_evaluation(self, evaluation: Evaluation, *, is_best: bool) -> None:
        loss = "" if evaluation.loss is None else f", loss {evaluation.loss:.3f}"
        selector = ""
        if evaluation.candidate_recall:
            selector = (
                f"; among the candidates {_slots(evaluation.candidate_recall)}, of these chosen "
                f"{_slots(evaluation.selector_accuracy)}"
            )
        self.say(
            f"epoch {evaluation.epoch:.1f}, step {evaluation.step:,}{loss}: acceptance length "
            f"{evaluation.acceptance_length:.2f}{' (best)' if is_best else ''}; accepted by slot "
            f"{_slots(evaluation.conditional_acceptance)}; recall@16 "
            f"{_slots(evaluation.recall_at_16)}{selector}"
        )

    def draw(self, trained: TrainedDraft) -> str | None:
        if find_spec("matplotlib") is None:
            what = "matplotlib is not installed: no page shows the curves"
            if what not in self._warnings:
                self.warn(what)
            return None
        from dflash_perf.report.training import render_training

        return render_training(self._name, trained, self._written)

    def show_result(self, pair: TrainedPair) -> None:
        """The last lines."""
        best, proof = pair.trained.best, pair.proof
        click.echo(
            f"{pair.draft}: acceptance length {best.acceptance_length:.2f} on held-out prompts, "
            f"of step {best.step:,}; training ended by {pair.trained.ended}"
        )
        speed = "" if proof.speedup is None else f"; {proof.speedup:.2f} × target_only at batch 1"
        click.echo(
            f"{pair.bundle}: {proof.tokens:,} tokens, {proof.logits:,} logits identical to the "
            f"baseline's{speed}"
        )
        click.echo(f"done in {_minutes(pair.seconds)}")

    def to_json(self, pair: TrainedPair | None) -> dict[str, Any]:
        """Everything that was shown."""
        told: dict[str, Any] = {
            "plan": None if self._plan is None else self._plan.to_json(),
            "chosen": self._chosen,
            "warnings": self._warnings,
        }
        if pair is not None:
            told |= {
                "draft": str(pair.draft),
                "bundle": str(pair.bundle),
                "best": asdict(pair.trained.best),
                "evaluations": list(map(asdict, pair.trained.evaluations)),
                "ended": pair.trained.ended,
                "proof": asdict(pair.proof),
                "seconds": pair.seconds,
            }
        return told


def _slots(values: list[float | None]) -> str:
    shown = " ".join("–" if one is None else f"{100 * one:.0f}" for one in values[:_SHOWN_SLOTS])
    return f"{shown}{' …' if len(values) > _SHOWN_SLOTS else ''} %"


def _minutes(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"

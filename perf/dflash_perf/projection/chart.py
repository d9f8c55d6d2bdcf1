"""The chart of a plan: projected fronts are dashed, measured ones solid."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dflash_perf.front import FrontPoint
from dflash_perf.harness.interactivity import build_fronts
from dflash_perf.harness.points import SweepPoint
from dflash_perf.projection.projection_tables import NOT_REACHABLE, UNIT, projected_front
from dflash_perf.report.content import Chart
from dflash_perf.report.style import (
    label_lines,
    log_axis,
    looks,
    mark_answers,
    name_lines,
    new_chart,
)
from dflash_trt.deploy.planning.decoding import Kind
from dflash_trt.deploy.planning.projection import BASELINE, Projection

DASHES = (
    (0, (5, 2.5)),
    (0, (1.2, 1.4)),
    (0, (7, 2, 1.2, 2)),
    (0, (3, 1.4, 1.2, 1.4, 1.2, 1.4)),
)
"""A line's pattern tells it apart where its colour does not."""
_MARKS = 7


def draw_plan(plan: Projection, measured: Sequence[SweepPoint] = ()) -> Chart:
    """Throughput against interactivity of every way of decoding, and of measured points."""
    figure, (axes,) = new_chart(height=4.8)
    fronts = {name: front.points for name, front in build_fronts(measured).items() if front.points}
    chosen = looks([*plan.points, *fronts], BASELINE)
    ends: list[tuple[float, float, str, str]] = []

    def draw(name: str, front: Sequence[FrontPoint], what: str, **style: Any) -> None:
        xs, ys = zip(*((point.interactivity, point.throughput) for point in front), strict=True)
        axes.plot(xs, ys, color=chosen[name].colour, **style)
        ends.append((xs[-1], ys[-1], f"{name}, {what}", chosen[name].colour))

    dashes = {str(kind): DASHES[at % len(DASHES)] for at, kind in enumerate(plan.points)}
    for kind in plan.points:
        projected = _with_answer(plan, kind)
        marks = {"marker": chosen[kind].marker, "markevery": max(1, len(projected) // _MARKS)}
        draw(kind, projected, "projection", linestyle=dashes[kind], **marks)
    for name, front in fronts.items():
        draw(name, front, "measured", marker=chosen[name].marker)
    axes.set_xlim(left=0)
    axes.margins(x=0.05)
    log_axis(axes)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_xlabel("interactivity, tokens/s per user (1 / TPOT)")
    axes.set_ylabel(f"output throughput, {UNIT}")
    if plan.interactivity is not None:
        answers = {kind: plan.answer(kind) for kind in plan.points}
        found = {str(kind): point.throughput if point else None for kind, point in answers.items()}
        mark_answers(axes, plan.interactivity, found, chosen, NOT_REACHABLE)
    label_lines(axes, ends, offset=8)
    patterns = dashes | dict.fromkeys(fronts, "solid")
    said = "dashed: PROJECTION, not measured" + ("; solid: measured" if fronts else "")
    name_lines(axes, chosen, [*plan.points, *fronts], styles=patterns, title=said)
    return Chart(
        "projection",
        "Projected throughput against interactivity",
        "Dashed lines are projections of the model, not measurements: at each interactivity the "
        f"best layout, batch and block. Output {UNIT}, logarithmic; no input tokens in it, but the "
        "time of their prefill."
        + ("" if plan.interactivity is None else " Rings mark the chosen interactivity.")
        + (" Solid lines are measured." if fronts else ""),
        f"Projected fronts of {', '.join(plan.points)}.",
        figure,
    )


def _with_answer(plan: Projection, kind: Kind) -> list[FrontPoint]:
    """A projected front, and on it the answer, which is searched between the sampled points."""
    front, answer = projected_front(plan, kind), plan.answer(kind)
    if answer is None or plan.interactivity is None:
        return list(front)
    ends = {plan.interactivity, answer.interactivity}
    more = [FrontPoint(at, answer.throughput, "answer") for at in ends]
    return sorted([*front, *more], key=lambda one: (one.interactivity, -one.throughput))

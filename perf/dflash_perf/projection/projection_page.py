"""Writes a plan as one self-contained HTML page, or its chart as a PNG.

Projected fronts are dashed, measured ones solid.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dflash_perf.extra import require
from dflash_perf.front import FrontPoint
from dflash_perf.harness.interactivity import build_fronts, throughput_unit
from dflash_perf.harness.points import SweepPoint
from dflash_perf.harness.store import ResultStore
from dflash_perf.projection.projection_tables import (
    UNIT,
    describe,
    plan_headline,
    plan_title,
    projected_front,
    sections,
)
from dflash_perf.report.report_page import Page, save_png
from dflash_perf.report.style import Chart, chart_style, log_axis, looks, mark_answers, new_chart
from dflash_trt.deploy.planning.calibration import StoredCalibration
from dflash_trt.deploy.planning.decoding import Kind
from dflash_trt.deploy.planning.projection import BASELINE, Projection
from dflash_trt.errors import DflashError

DASHES = (
    (0, (5, 2.5)),
    (0, (1.2, 1.4)),
    (0, (7, 2, 1.2, 2)),
    (0, (3, 1.4, 1.2, 1.4, 1.2, 1.4)),
)
"""A line's pattern tells it apart where its colour does not."""


def write_plan(
    plan: Projection, stored: StoredCalibration, output: Path, measured: Path | None = None
) -> None:
    """Writes `output`: a PNG if its suffix is .png, else HTML.

    Args:
        measured: folder of a sweep's results, drawn as solid lines beside the dashed projection.

    Raises:
        DflashError: the perf extra is missing, or `measured` holds no results per GPU.
    """
    require("a drawn plan", "matplotlib")
    points = [] if measured is None else ResultStore(measured).points()
    if measured is not None and not points:
        raise DflashError("holds no finished run", where=measured, usage=True)
    if points and throughput_unit(points) != UNIT:
        what = "its throughput is per server, a plan's per GPU"
        fix = "give `gpus` in the sweep's YAML"
        raise DflashError(what, where=measured, fix=fix, usage=True)
    with chart_style():
        chart = draw_plan(plan, points)
        output.parent.mkdir(parents=True, exist_ok=True)
        if output.suffix == ".png":
            save_png(chart, output)
            return
        first, *others = sections(plan, stored)
        beside = "; only solid lines of the chart are measured" if points else ""
        page = Page(
            title=plan_title(plan),
            subtitle=f"Every figure on this page is a projection{beside}.",
            headline=plan_headline(plan),
            sections=[
                (first[0], [first[1], chart]),
                ("assumptions", [describe(plan)]),
                *((heading, [table]) for heading, table in others),
            ],
        )
        output.write_text(page.to_html(), encoding="utf-8")


def draw_plan(plan: Projection, measured: Sequence[SweepPoint] = ()) -> Chart:
    """Throughput against interactivity of every way of decoding, and of measured points."""
    figure, (axes,) = new_chart(height=5.3)
    fronts = {name: front.points for name, front in build_fronts(measured).items() if front.points}
    chosen = looks([*plan.points, *fronts], BASELINE)

    def draw(name: str, front: Sequence[FrontPoint], what: str, **style: Any) -> None:
        xs, ys = zip(*((point.interactivity, point.throughput) for point in front), strict=True)
        axes.plot(xs, ys, label=f"{name}, {what}", **chosen[name], **style)

    for number, kind in enumerate(plan.points):
        projected = _with_answer(plan, kind)
        every = max(1, len(projected) // 7)
        dashes = DASHES[number % len(DASHES)]
        draw(kind, projected, "projection", linestyle=dashes, markevery=every)
    for name, front in fronts.items():
        draw(name, front, "measured")
    axes.set_xlim(left=0)
    axes.margins(x=0.05)
    log_axis(axes)
    axes.set_xlabel("interactivity, tokens/s per user (1 / TPOT)")
    axes.set_ylabel(f"output throughput, {UNIT}")
    if plan.interactivity is not None:
        answers = {kind: plan.answer(kind) for kind in plan.points}
        found = {str(kind): point.throughput if point else None for kind, point in answers.items()}
        mark_answers(axes, plan.interactivity, found, chosen)
    said = "dashed: PROJECTION, not measured" + ("; solid: measured" if fronts else "")
    below: dict[str, Any] = {"loc": "outside lower left", "ncols": 2, "handlelength": 4.5}
    figure.legend(title=said, title_fontsize=8.5, alignment="left", **below)
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

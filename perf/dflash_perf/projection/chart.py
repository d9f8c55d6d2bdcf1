"""The fronts of a plan: dashed, since they are projections; measured ones beside them are solid."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dflash_perf.front import FrontPoint
from dflash_perf.harness.answers import build_fronts
from dflash_perf.harness.points import SweepPoint
from dflash_perf.projection.tables import NOT_REACHABLE, UNIT, projected_front
from dflash_perf.report.content import Chart
from dflash_perf.report.style import (
    FAINT,
    Look,
    label_lines,
    log_axis,
    looks,
    mark_interactivity,
    new_chart,
)
from dflash_trt.planning.projection import BASELINE, Projection

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DASHES = (0, (5, 2.5))


def draw_plan(plan: Projection, measured: Sequence[SweepPoint] = ()) -> Chart:
    """Throughput against interactivity of every decoding, and of what was measured."""
    figure, (axes,) = new_chart(height=4.8)
    measured_fronts = build_fronts(measured)
    chosen = looks([*plan.points, *measured_fronts], BASELINE)
    ends: list[tuple[float, float, str, str]] = []
    for kind in plan.points:
        front, look = projected_front(plan, kind), chosen[kind]
        axes.plot(*_coordinates(front), color=look.colour, linestyle=DASHES)
        last = front[-1]
        ends.append((last.interactivity, last.throughput, f"{kind}, projection", look.colour))
    for name, found in measured_fronts.items():
        if found.points:
            ends.append(_draw_measured(axes, name, found.points, chosen[name]))
    axes.set_xlim(left=0)
    axes.margins(x=0.05)
    log_axis(axes)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_xlabel("interactivity, tokens/s per user (1 / TPOT)")
    axes.set_ylabel(f"output throughput, {UNIT}")
    _mark_answers(axes, plan, chosen)
    label_lines(axes, ends, offset=8)
    axes.annotate(
        "dashed: PROJECTION, not measured" + ("; solid: measured" if measured_fronts else ""),
        (1, 1),  # fronts fall: nothing is drawn in that corner
        xycoords="axes fraction",
        xytext=(-2, -6),
        textcoords="offset points",
        ha="right",
        va="top",
        fontsize=8.5,
        color=FAINT,
    )
    return Chart(
        "projection",
        "Projected throughput against interactivity",
        "Dashed lines are projections of the model, not measurements: at each interactivity the "
        f"best layout, batch and block. Output {UNIT}, logarithmic; no input tokens in it, but the "
        "time of their prefill. Rings mark the chosen interactivity."
        + (" Solid lines are measured." if measured_fronts else ""),
        f"Projected fronts of {', '.join(plan.points)}.",
        figure,
    )


def _coordinates(front: Sequence[FrontPoint]) -> tuple[list[float], list[float]]:
    return [point.interactivity for point in front], [point.throughput for point in front]


def _draw_measured(
    axes: Axes, name: str, front: Sequence[FrontPoint], look: Look
) -> tuple[float, float, str, str]:
    axes.plot(*_coordinates(front), color=look.colour, marker=look.marker)
    last = front[-1]
    return last.interactivity, last.throughput, f"{name}, measured", look.colour


def _mark_answers(axes: Axes, plan: Projection, chosen: dict[str, Look]) -> None:
    at, missing = plan.interactivity, []
    for kind in plan.points:
        point = plan.answer(kind)
        if point is None:
            missing.append(f"{kind}: {NOT_REACHABLE}")
            continue
        (ring,) = axes.plot([at], [point.throughput], "o", color=chosen[kind].colour, markersize=9)
        ring.set(markerfacecolor="white", markeredgewidth=1.8)
    mark_interactivity(axes, at, missing)

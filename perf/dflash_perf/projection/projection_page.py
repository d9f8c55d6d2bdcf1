"""Writes a plan as one self-contained HTML page, or its chart as a PNG."""

from __future__ import annotations

from pathlib import Path

from dflash_perf.extra import require
from dflash_perf.harness.interactivity import throughput_unit
from dflash_perf.harness.points import SweepPoint
from dflash_perf.harness.store import ResultStore
from dflash_perf.projection.chart import draw_plan
from dflash_perf.projection.projection_tables import (
    UNIT,
    describe,
    plan_headline,
    plan_title,
    sections,
)
from dflash_perf.report.report_page import render_page, save_png
from dflash_perf.report.style import chart_style
from dflash_trt.deploy.planning.calibration import StoredCalibration
from dflash_trt.deploy.planning.projection import Projection
from dflash_trt.errors import DflashError

_TEMPLATES = Path(__file__).parent


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
    points = _read_points(measured)
    with chart_style():
        chart = draw_plan(plan, points)
        output.parent.mkdir(parents=True, exist_ok=True)
        if output.suffix == ".png":
            save_png(chart, output)
            return
        text = render_page(
            "plan.html.j2",
            [chart],
            _TEMPLATES,
            title=plan_title(plan),
            headline=plan_headline(plan),
            lines=describe(plan),
            measured=bool(points),
            sections=sections(plan, stored),
        )
    output.write_text(text, encoding="utf-8")


def _read_points(measured: Path | None) -> list[SweepPoint]:
    if measured is None:
        return []
    points = ResultStore(measured).points()
    if not points:
        raise DflashError("holds no finished run", where=measured, usage=True)
    if throughput_unit(points) != UNIT:
        raise DflashError(
            "its throughput is per server, a plan's per GPU",
            where=measured,
            fix="give `gpus` in the sweep's YAML",
            usage=True,
        )
    return points

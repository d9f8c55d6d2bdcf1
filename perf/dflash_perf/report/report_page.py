"""Writes a report: one self-contained HTML page, Markdown, and its charts as PNG."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup

from dflash_perf.extra import require
from dflash_perf.harness.store import ResultStore
from dflash_perf.report.content import Chart, Content, gather
from dflash_perf.report.style import chart_style

if TYPE_CHECKING:
    from collections.abc import Sequence

PNG_DPI = 160
_TEMPLATES = Path(__file__).parent
_METADATA = re.compile(r"<metadata>.*?</metadata>", re.DOTALL)
_NAMESPACES = re.compile(r'\s+xmlns(?::\w+)?="[^"]*"')


def write_report(
    results: Path, output: Path, targets: Sequence[float], baseline: str | None
) -> list[Path]:
    """Writes `output` (HTML), and beside it NAME.md and NAME-CHART.png; returns all, HTML first.

    Raises:
        DflashError: `results` is no sweep's folder or has no run, or the perf extra is missing.
    """
    require("a report", "matplotlib", "scipy")
    with chart_style():
        content = gather(ResultStore(results), targets, baseline)
        output.parent.mkdir(parents=True, exist_ok=True)
        images = [
            save_png(chart, output.with_name(f"{output.stem}-{chart.key}.png"))
            for chart in content.charts
        ]
        drawings = [Markup(to_svg(chart)) for chart in content.charts]
    output.write_text(_render("page.html.j2", content, drawings), encoding="utf-8")
    text = output.with_suffix(".md")
    names = [image.name for image in images]
    text.write_text(_render("page.md.j2", content, names), encoding="utf-8")
    return [output, text, *images]


def to_svg(chart: Chart) -> str:
    """The chart as an <svg> element with its alternative text, no links, and unique ids."""
    buffer = io.StringIO()
    chart.figure.savefig(buffer, format="svg", metadata={"Date": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = _NAMESPACES.sub("", _METADATA.sub("", svg))
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{chart.key}-", svg)
    label = str(Markup.escape(chart.alternative))
    return svg.replace("<svg", f'<svg role="img" aria-label="{label}"', 1).strip()


def render_page(template: str, charts: Sequence[Chart], *folders: Path, **values: Any) -> str:
    """The page of a template in `folders` or here, with its charts' drawings."""
    drawings = [(chart, Markup(to_svg(chart))) for chart in charts]
    return templates(*folders).get_template(template).render(drawings=drawings, **values)


def save_png(chart: Chart, path: Path) -> Path:
    """Writes the chart as a PNG, with the same bytes each time; returns `path`."""
    chart.figure.savefig(path, format="png", dpi=PNG_DPI, metadata={"Software": None})
    return path


def _render(template: str, content: Content, drawings: Sequence[str]) -> str:
    environment = templates(is_html=template.endswith(".html.j2"))
    environment.filters |= {"text": _markdown_text, "cell": _markdown_cell, "path": quote}
    pairs = list(zip(content.charts, drawings, strict=True))
    return environment.get_template(template).render(content=content, drawings=pairs)


def templates(*folders: Path, is_html: bool = True) -> Environment:
    """Templates in `folders` and the shared ones here; values in HTML are escaped."""
    loader = FileSystemLoader((*folders, _TEMPLATES))
    return Environment(loader=loader, autoescape=is_html, keep_trailing_newline=True)


def _markdown_text(text: str) -> str:
    """`text` on one line, with all Markdown and HTML escaped."""
    return re.sub(r"([\\`*_<>\[\]#])", r"\\\1", " ".join(text.split()))


def _markdown_cell(text: str) -> str:
    return _markdown_text(text).replace("|", r"\|")

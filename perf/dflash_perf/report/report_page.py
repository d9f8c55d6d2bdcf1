"""A page: title, headline, and sections of text, tables, notes and charts; HTML and Markdown."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup

from dflash_perf.report.report_tables import Table
from dflash_perf.report.style import Chart
from dflash_trt.serving.openai.page import read_style

PNG_DPI = 160
_METADATA = re.compile(r"<metadata>.*?</metadata>", re.DOTALL)
_NAMESPACES = re.compile(r'\s+xmlns(?::\w+)?="[^"]*"')

PagePart = str | Table | Chart | Sequence[str]
"""A paragraph, a table, a chart, or notes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Everything that a page shows.

    Args:
        headline: what it says, in a sentence or two.
        sections: parts under a heading, which may be "".
    """

    title: str
    subtitle: str
    headline: str | None
    sections: Sequence[tuple[str, Sequence[PagePart | None]]]

    def to_html(self) -> str:
        """One file that loads nothing."""
        return self._render("page.html.j2", lambda chart: Markup(_to_svg(chart)))

    def to_markdown(self, image: Callable[[Chart], str]) -> str:
        """The same in Markdown, with the file name of each chart's `image`."""
        return self._render("page.md.j2", image)

    def _render(self, template: str, draw: Callable[[Chart], str]) -> str:
        is_html = template.endswith(".html.j2")
        environment = Environment(
            loader=FileSystemLoader(Path(__file__).parent),
            autoescape=is_html,
            trim_blocks=is_html,
            keep_trailing_newline=True,
        )
        filters = {"text": _markdown_text, "cell": _markdown_cell, "path": quote}
        environment.filters.update(filters)
        shown = [(heading, [part for part in parts if part]) for heading, parts in self.sections]
        style = Markup(read_style())
        page = replace(self, sections=[(heading, parts) for heading, parts in shown if parts])
        return environment.get_template(template).render(page=page, draw=draw, style=style)


def save_png(chart: Chart, path: Path) -> Path:
    """Writes the chart as a PNG, with the same bytes each time; returns `path`."""
    chart.figure.savefig(path, format="png", dpi=PNG_DPI, metadata={"Software": None})
    return path


def _to_svg(chart: Chart) -> str:
    """The chart as an <svg> element with its alternative text, no links, and unique ids."""
    buffer = io.StringIO()
    chart.figure.savefig(buffer, format="svg", metadata={"Date": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = _NAMESPACES.sub("", _METADATA.sub("", svg))
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{chart.key}-", svg)
    label = str(Markup.escape(chart.alternative))
    return svg.replace("<svg", f'<svg role="img" aria-label="{label}"', 1).strip()


def _markdown_text(text: str) -> str:
    """`text` on one line, with all Markdown and HTML escaped."""
    return re.sub(r"([\\`*_<>\[\]#])", r"\\\1", " ".join(text.split()))


def _markdown_cell(text: str) -> str:
    return _markdown_text(text).replace("|", r"\|")

"""The style of charts: few lines, names in their colours, safe for colour-blind readers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, HEIGHT = 7.6, 4.3
LEGEND_WIDTH = 0.88
"""Of a figure: what the axes' own labels leave."""
INK, FAINT = "#222222", "#8a8a8a"
# Okabe and Ito's palette without yellow, which is too pale on white, and two of Tol's; the baseline
# is grey.
BASELINE_COLOUR = "#555555"
COLOURS = (
    *("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"),
    *("#882255", "#999933"),
)
MARKERS = "os^DvPp*"

_SETTINGS: dict[str, Any] = {
    "font.family": ["DejaVu Sans"],
    "font.size": 9.5,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.7,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "lines.linewidth": 1.8,
    "lines.markersize": 5.5,
    "legend.frameon": False,
    "legend.labelcolor": "linecolor",
    "figure.constrained_layout.use": True,
    "svg.fonttype": "path",
    "svg.hashsalt": "dflash",
}


@dataclass(frozen=True, slots=True)
class Chart:
    """A figure of a page.

    Args:
        key: its name in file names and anchors.
        caption: what it shows, with the definition of its figures.
        alternative: a text for readers who cannot see it.
    """

    key: str
    title: str
    caption: str
    alternative: str
    figure: Figure


Look = dict[str, Any]
"""How a configuration is drawn, the same in every chart: matplotlib's color and marker."""


def looks(names: Sequence[str], baseline: str) -> dict[str, Look]:
    """A look for each configuration; after eight, colours repeat with another marker."""
    others = [name for name in names if name != baseline]
    chosen = {baseline: {"color": BASELINE_COLOUR, "marker": "X"}}
    for index, name in enumerate(others):
        turn = index // len(COLOURS)
        marker = MARKERS[(index + turn) % len(MARKERS)]
        chosen[name] = {"color": COLOURS[index % len(COLOURS)], "marker": marker}
    return chosen


@contextmanager
def chart_style() -> Iterator[None]:
    """Matplotlib's settings for the charts made inside."""
    import matplotlib

    settings: Any = _SETTINGS  # its keys are a Literal type of matplotlib's own
    with matplotlib.rc_context(settings):
        yield


def new_chart(columns: int = 1, height: float = HEIGHT) -> tuple[Figure, list[Axes]]:
    """A figure that is not shown in a window, and its axes from left to right."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height))
    axes = figure.subplots(1, columns, squeeze=False, sharey=True)[0]
    return figure, list(axes)


def name_above(axes: Axes, count: int) -> None:
    """Names of the lines in rows above the axes, as many in a row as the figure is wide."""
    widest = LEGEND_WIDTH * axes.figure.bbox.width
    for columns in range(min(count, 4), 0, -1):
        legend = axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=columns)
        if legend.get_window_extent().width <= widest:
            break


def mark_answers(
    axes: Axes, at: float, found: Mapping[str, float | None], chosen: dict[str, Look]
) -> None:
    """A line at the interactivity `at`, in tokens/s per user, and a ring at each throughput."""
    axes.axvline(at, color=INK, linewidth=0.9, linestyle=(0, (4, 3)))
    axes.annotate(
        f"at {at:.4g} tokens/s per user",
        (at, 1),
        xycoords=axes.get_xaxis_transform(),
        xytext=(0, 3),
        textcoords="offset points",
        ha="center",
        fontsize=8.5,
    )
    for name, value in found.items():
        if value is not None:
            (ring,) = axes.plot([at], [value], "o", color=chosen[name]["color"], markersize=10)
            ring.set(markerfacecolor="white", markeredgewidth=1.8, zorder=5)


def draw_shares(axes: Axes, lines: Mapping[str, Sequence[float | None]], **style: Any) -> None:
    """Lines over slots 1, 2, … of shares from 0 to 1; what is None is left out."""
    for name, values in lines.items():
        known = [(slot, one) for slot, one in enumerate(values, start=1) if one is not None]
        if known:
            axes.plot(*zip(*known, strict=True), **{"marker": "o", "label": name, **style})
    axes.set_ylim(0, 1.03)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    longest = max((len(values) for values in lines.values()), default=1)
    axes.set_xticks(range(1, longest + 1, max(1, longest // 16)))


def log_axis(axes: Axes) -> None:
    """A logarithmic y axis with plain numbers at 1, 2 and 5."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(axis="y", which="minor", left=False)

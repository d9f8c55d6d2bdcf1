"""The style of charts: few lines, labels at the data, colours safe for colour-blind readers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, HEIGHT = 7.6, 4.3
INK, FAINT = "#222222", "#8a8a8a"
# Okabe and Ito's palette without yellow, which is too pale on white; the baseline is grey.
BASELINE_COLOUR = "#555555"
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = "os^DvP"

_SETTINGS: dict[str, Any] = {
    "font.family": ["DejaVu Sans"],
    "font.size": 9.5,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "axes.labelsize": 9.5,
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
    "figure.constrained_layout.use": True,
    "svg.fonttype": "path",
    "svg.hashsalt": "dflash",
}


@dataclass(frozen=True, slots=True)
class Look:
    """How a configuration is drawn, the same in every chart."""

    colour: str
    marker: str


def looks(names: Sequence[str], baseline: str) -> dict[str, Look]:
    """A look for each configuration; after six, colours repeat with another marker."""
    others = [name for name in names if name != baseline]
    chosen = {baseline: Look(BASELINE_COLOUR, "X")}
    for index, name in enumerate(others):
        turn = index // len(COLOURS)
        marker = MARKERS[(index + turn) % len(MARKERS)]
        chosen[name] = Look(COLOURS[index % len(COLOURS)], marker)
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


def label_lines(
    axes: Axes,
    ends: Sequence[tuple[float, float, str, str]],
    *,
    offset: float = 8,
) -> None:
    """Labels the ends of lines, given as (x, y, text, colour).

    A label stands `offset` points right of the end. Labels that would overlap are moved apart and
    keep their order.
    """
    axes.figure.canvas.draw()
    ordered = sorted(ends, key=lambda end: end[1])
    heights = [float(axes.transData.transform((x, y))[1]) for x, y, _, _ in ordered]
    gap = 13.5 * axes.figure.dpi / 100
    for index in range(1, len(heights)):
        heights[index] = max(heights[index], heights[index - 1] + gap)
    for (x, y, text, colour), height in zip(ordered, heights, strict=True):
        shift = (height - float(axes.transData.transform((x, y))[1])) * 72 / axes.figure.dpi
        axes.annotate(
            text,
            (x, y),
            xytext=(offset, shift),
            textcoords="offset points",
            va="center",
            color=colour,
            path_effects=white_halo(),
            annotation_clip=False,
            zorder=6,
        )


def name_row(axes: Axes, chosen: dict[str, Look], names: Sequence[str]) -> None:
    """Names in their colours above the axes, for charts without line ends to label."""
    place: dict[str, Any] = {
        "loc": "lower left",
        "bbox_to_anchor": (0, 1.0),
        "ncols": min(len(names), 4),
    }
    name_lines(axes, chosen, names, **place)


def name_lines(
    axes: Axes,
    chosen: dict[str, Look],
    names: Sequence[str],
    *,
    styles: Mapping[str, Any] | None = None,
    labels: Mapping[str, str] | None = None,
    **place: Any,
) -> None:
    """Names in their colours, at the top right by default, which falling lines leave free.

    `styles` are those of lines that tell names apart too, `labels` what is said for a name.
    """
    from matplotlib.lines import Line2D

    styles = styles or {}
    shown = [(name, chosen[name]) for name in names]
    axes.legend(
        [
            Line2D([], [], color=one.colour, marker=one.marker, linestyle=styles.get(name, ""))
            for name, one in shown
        ],
        [(labels or {}).get(name, name) for name in names],
        **{"loc": "upper right", "title_fontsize": 8.5, "alignment": "left", **place},
        frameon=False,
        handletextpad=0.6 if styles else 0.3,
        handlelength=4.5 if styles else 2.0,
        columnspacing=1.4,
        borderaxespad=0.2,
        labelcolor=[one.colour for _, one in shown],
    )


def mark_answers(
    axes: Axes, at: float, found: dict[str, float | None], chosen: dict[str, Look], missing: str
) -> None:
    """A line at the interactivity `at`, in tokens/s per user, and a ring at each throughput.

    The text above the axes also names the configurations without one, with `missing` as reason.
    """
    axes.axvline(at, color=INK, linewidth=0.9, linestyle=(0, (4, 3)))
    notes = [f"{name}: {missing}" for name, value in found.items() if value is None]
    axes.annotate(
        "\n".join([f"at {at:g} tokens/s per user", *notes]),
        (at, 1),
        xycoords=axes.get_xaxis_transform(),
        xytext=(0, 3),
        textcoords="offset points",
        ha="center",
        fontsize=8.5,
        color=INK,
    )
    for name, value in found.items():
        if value is not None:
            (ring,) = axes.plot([at], [value], "o", color=chosen[name].colour, markersize=10)
            ring.set(markerfacecolor="white", markeredgewidth=1.8, zorder=5)


def log_axis(axes: Axes) -> None:
    """A logarithmic y axis with plain numbers at 1, 2 and 5."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(axis="y", which="minor", left=False)


def white_halo() -> list[Any]:
    """Keeps small text readable where lines run behind it."""
    from matplotlib.patheffects import withStroke

    return [withStroke(linewidth=2.5, foreground="white")]

"""The charts of a report; each is None if the sweep has no data for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dflash_perf.harness.interactivity import SweepAnswer, build_fronts, throughput_unit
from dflash_perf.harness.load_metrics import AcceptanceProfile
from dflash_perf.harness.points import SweepPoint
from dflash_perf.harness.sweep_config import OfferedLoad
from dflash_perf.report.style import (
    INK,
    Chart,
    Look,
    draw_shares,
    log_axis,
    looks,
    mark_answers,
    name_above,
    new_chart,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_BAND = ("p5", "p25", "p50", "p75", "p95")
JOIN = " · "  # names may hold commas


@dataclass(frozen=True, slots=True)
class ChartData:
    """The data of all charts.

    Args:
        points: by configuration in order, loads from light to heavy.
        profiles: acceptance over all runs of a configuration, if it drafted.
        answer: the answer whose interactivity is marked.
    """

    points: Sequence[SweepPoint]
    baseline: str
    profiles: dict[str, AcceptanceProfile]
    answer: SweepAnswer | None

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys(point.configuration for point in self.points))

    @property
    def looks(self) -> dict[str, Look]:
        return looks(self.names, self.baseline)


def draw_all(data: ChartData) -> list[Chart]:
    """Every chart that the sweep has data for."""
    unit = throughput_unit(data.points)
    band = "Mark: median; thick: 25 to 75 %; thin: 5 to 95 % of requests. Logarithmic."
    wanted = [
        (
            "front",
            "Throughput against interactivity",
            f"Interactivity = 1 / median TPOT. Throughput = output {unit}, mean and range of the "
            "repeats; no input tokens in it. Numbers at points are concurrency (or requests/s). "
            "The curve is a monotone cubic through the Pareto front, not continued past its ends; "
            "pale points are beaten in both. A ring marks the chosen interactivity.",
            f"Pareto fronts of {JOIN.join(data.names)}.",
            _draw_fronts(data, unit),
        ),
        (
            "speedup",
            "Speed-up against concurrency",
            f"Output throughput ÷ that of {data.baseline} at the same concurrency, repeat by "
            "repeat: mean and range.",
            f"Throughput relative to {data.baseline}, by concurrency.",
            _draw_speedup(data),
        ),
        (
            "acceptance-by-position",
            "Acceptance along the block",
            "Share of drafts accepted at a position, given that all before it in their block were; "
            "τ = tokens emitted by verify steps / steps, bonus token included. Where a server does "
            "not count positions, a last step that a limit cut short counts as a rejection.",
            "Conditional acceptance by draft position.",
            _draw_positions(data),
        ),
    ]
    times = [
        ("ttft", "time to first token", "Request sent → first text."),
        ("tpot", "time per output token", "(E2E - TTFT) / (output tokens - 1), of each request."),
    ]
    for tag, name, formula in times:
        alternative, figure = f"Distribution of the {name} by load.", _draw_bands(data, tag, name)
        wanted.append((tag, name.capitalize(), f"{formula} {band}", alternative, figure))
    return [
        Chart(key, title, caption, alternative, figure)
        for key, title, caption, alternative, figure in wanted
        if figure is not None
    ]


def _draw_fronts(data: ChartData, unit: str) -> Figure | None:
    """Throughput against interactivity, with the answer marked."""
    fronts = {name: front for name, front in build_fronts(data.points).items() if front.points}
    if not fronts:
        return None
    figure, (axes,) = new_chart(height=4.6 + 0.1 * len(fronts))
    found = {} if data.answer is None else data.answer.values
    for name, front in fronts.items():
        look, value, label = data.looks[name], found.get(name), name
        if value is not None and data.answer is not None:
            ratio = data.answer.ratio(name)
            is_other = ratio is not None and name != data.baseline
            label += f": {value.sign}{value.throughput:,.0f}"
            label += f" ({value.sign}{ratio:.2f}×)" if is_other else ""
        xs, ys = zip(*front.curve(), strict=True)
        axes.plot(xs, ys, **look, markevery=[], label=label)
        best = {(point.interactivity, point.throughput) for point in front.points}
        for point in data.points:
            x, y = point.interactivity, point.throughput
            if point.configuration != name or x is None or y is None:
                continue
            alpha = 1 if (x, y.mean) in best else 0.4
            spread = [[y.mean - y.min], [y.max - y.mean]]
            style: dict[str, Any] = {"color": look["color"], "alpha": alpha}
            axes.errorbar([x], [y.mean], yerr=spread, fmt=look["marker"], elinewidth=1, **style)
            # To the right, as the curve falls: above, the label would touch the next point.
            style |= {"xytext": (6, 3), "textcoords": "offset points", "fontsize": 7.5}
            axes.annotate(_short(point.load), (x, y.mean), **style)
    axes.margins(x=0.05, y=0.08)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("interactivity, tokens/s per user (1 / median TPOT)")
    axes.set_ylabel(f"output throughput, {unit}")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    if data.answer is not None:
        rates = {name: value.throughput if value else None for name, value in found.items()}
        mark_answers(axes, data.answer.interactivity, rates, data.looks)
    figure.legend(loc="outside lower left", ncols=2)  # inside it would cover points
    return figure


def _short(load: OfferedLoad) -> str:
    return str(load.concurrency) if load.concurrency else f"{load.request_rate:g}/s"


def _draw_speedup(data: ChartData) -> Figure | None:
    """Throughput ÷ the baseline's at the same concurrency, repeat by repeat."""
    closed = [(point, point.load.concurrency) for point in data.points if point.load.concurrency]
    baseline = {load: point for point, load in closed if point.configuration == data.baseline}
    series: dict[str, list[tuple[int, list[float]]]] = {}
    for point, concurrency in closed:
        if point.configuration != data.baseline and concurrency in baseline:
            ratios = _ratios(point, baseline[concurrency])
            if ratios:
                series.setdefault(point.configuration, []).append((concurrency, ratios))
    if not series:
        return None
    figure, (axes,) = new_chart()
    axes.set_xscale("log", base=2)
    for name, entries in series.items():
        means = [sum(ratios) / len(ratios) for _, ratios in entries]
        low = [mean - min(r) for mean, (_, r) in zip(means, entries, strict=True)]
        high = [max(r) - mean for mean, (_, r) in zip(means, entries, strict=True)]
        style: dict[str, Any] = {"yerr": [low, high], "elinewidth": 1, "label": name}
        axes.errorbar([load for load, _ in entries], means, **data.looks[name], **style)
    axes.axhline(1, color=INK, linewidth=1)
    ticks = sorted({concurrency for entries in series.values() for concurrency, _ in entries})
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("concurrency")
    axes.set_ylabel(f"throughput ÷ {data.baseline}")
    name_above(axes, len(series))
    return figure


def _ratios(point: SweepPoint, other: SweepPoint) -> list[float]:
    """Ratios to the baseline by repeat: equal repeats ran close together in time."""
    theirs = {run.repeat: run.values.get("output_throughput") for run in other.runs}
    return [
        mine / base
        for run in point.runs
        if (mine := run.values.get("output_throughput")) and (base := theirs.get(run.repeat))
    ]


def _draw_positions(data: ChartData) -> Figure | None:
    """Conditional acceptance along the block."""
    if not data.profiles:
        return None
    figure, (axes,) = new_chart(height=3.8)
    # Short blocks are drawn last: longer ones have the same beginning and would hide them.
    by_length = sorted(data.profiles.items(), key=lambda item: len(item[1].conditional))
    for name, profile in reversed(by_length):
        label = f"{name}: τ = {profile.acceptance_length:.2f}"
        draw_shares(axes, {label: profile.conditional}, **data.looks[name])
    draw_shares(axes, {"": [None] * len(by_length[-1][1].conditional)})  # ticks of the longest
    axes.set_xlabel("draft position in the block")
    axes.set_ylabel("accepted, given all before it were")
    name_above(axes, len(by_length))
    return figure


def _draw_bands(data: ChartData, tag: str, label: str) -> Figure | None:
    """A request metric in ms by load: p5-p95 as a thin line, p25-p75 as a thick one, its median."""
    loads = sorted({point.load for point in data.points}, key=lambda load: load.order)
    figure, (axes,) = new_chart()
    drawn: dict[str, str] = {}
    spacing = min(0.8 / max(len(data.names), 1), 0.22)
    for point in data.points:
        name, number = point.configuration, data.names.index(point.configuration)
        values = [point.quantile(tag, statistic) for statistic in _BAND]
        known = [value * 1e3 for value in values if value is not None]
        if len(known) != len(_BAND):
            continue
        colour = data.looks[name]["color"]
        x = loads.index(point.load) + (number - (len(data.names) - 1) / 2) * spacing
        axes.vlines(x, known[0], known[4], color=colour, linewidth=1.1)
        axes.vlines(x, known[1], known[3], color=colour, linewidth=4.5, alpha=0.55)
        shown = None if name in drawn else name
        axes.plot([x], [known[2]], **data.looks[name], linestyle="", markersize=5, label=shown)
        drawn[name] = name
    if not drawn:
        return None
    log_axis(axes)
    axes.grid(axis="x", visible=False)
    axes.set_xticks(range(len(loads)), [_short(load) for load in loads])
    axes.set_xlabel("concurrency" if all(load.concurrency for load in loads) else "load")
    axes.set_ylabel(f"{label}, ms")
    name_above(axes, len(drawn))
    return figure

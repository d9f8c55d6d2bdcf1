"""The charts of a report; each is None if the sweep has no data for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dflash_perf.harness.interactivity import (
    NOT_MEASURED,
    SweepAnswer,
    at_least,
    build_fronts,
    throughput_unit,
)
from dflash_perf.harness.load_metrics import AcceptanceProfile
from dflash_perf.harness.points import SweepPoint
from dflash_perf.harness.sweep_config import OfferedLoad
from dflash_perf.report.style import (
    INK,
    Look,
    label_lines,
    log_axis,
    looks,
    mark_answers,
    name_lines,
    name_row,
    new_chart,
    white_halo,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BAND = ("p5", "p25", "p50", "p75", "p95")


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


def draw_fronts(data: ChartData) -> Figure | None:
    """Throughput against interactivity, with the answer marked."""
    fronts = {name: front for name, front in build_fronts(data.points).items() if front.points}
    if not fronts:
        return None
    figure, (axes,) = new_chart(height=4.8)
    for name, front in fronts.items():
        look = data.looks[name]
        xs, ys = zip(*front.curve(), strict=True)
        axes.plot(xs, ys, color=look.colour)
        on_front = {(point.interactivity, point.throughput) for point in front.points}
        for point in data.points:
            if point.configuration == name:
                _draw_point(axes, point, look, on_front=on_front)
    axes.margins(x=0.05, y=0.08)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("interactivity, tokens/s per user (1 / median TPOT)")
    axes.set_ylabel(f"output throughput, {throughput_unit(data.points)}")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    answers = _mark_answer(axes, data)
    labels = {name: f"{name}: {answers[name]}" if name in answers else name for name in fronts}
    name_lines(axes, data.looks, list(fronts), labels=labels)
    return figure


def _draw_point(
    axes: Axes, point: SweepPoint, look: Look, *, on_front: set[tuple[float, float]]
) -> None:
    throughput, interactivity = point.throughput, point.interactivity
    if throughput is None or interactivity is None:
        return
    kept = (interactivity, throughput.mean) in on_front
    axes.errorbar(
        [interactivity],
        [throughput.mean],
        yerr=[[throughput.mean - throughput.low], [throughput.high - throughput.mean]],
        fmt=look.marker,
        color=look.colour,
        elinewidth=1,
        alpha=1 if kept else 0.35,
    )
    # To the right, as the curve falls: above, the label would touch the next point.
    axes.annotate(
        _short(point.load),
        (interactivity, throughput.mean),
        xytext=(6, 3),
        textcoords="offset points",
        fontsize=7.5,
        color=look.colour,
        alpha=1 if kept else 0.6,
        path_effects=white_halo(),
        zorder=4,
    )


def _short(load: OfferedLoad) -> str:
    return str(load.concurrency) if load.concurrency else f"{load.request_rate:g}/s"


def _mark_answer(axes: Axes, data: ChartData) -> dict[str, str]:
    """Rings; what they say stands beside the names, where no curve and no point is in its way."""
    if data.answer is None:
        return {}
    at = data.answer.interactivity
    found = {
        name: None if value is None else value.throughput
        for name, value in data.answer.values.items()
    }
    mark_answers(axes, at, found, data.looks, NOT_MEASURED)
    said: dict[str, str] = {}
    for name, throughput in found.items():
        if throughput is not None:
            ratio = data.answer.ratio(name)
            least = at_least(data.answer.is_least(name))
            shown = "" if ratio is None or name == data.baseline else f" ({least}{ratio:.2f}×)"
            said[name] = f"{least}{throughput:,.0f}{shown}"
    return said


def draw_speedup(data: ChartData) -> Figure | None:
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
    ends: list[tuple[float, float, str, str]] = []
    for name, entries in series.items():
        look = data.looks[name]
        xs = [concurrency for concurrency, _ in entries]
        means = [sum(ratios) / len(ratios) for _, ratios in entries]
        low = [mean - min(r) for mean, (_, r) in zip(means, entries, strict=True)]
        high = [max(r) - mean for mean, (_, r) in zip(means, entries, strict=True)]
        axes.errorbar(
            xs, means, yerr=[low, high], fmt=f"-{look.marker}", color=look.colour, elinewidth=1
        )
        ends.append((xs[-1], means[-1], name, look.colour))
    ticks = sorted({concurrency for entries in series.values() for concurrency, _ in entries})
    axes.axhline(1, color=INK, linewidth=1)
    axes.annotate(
        f"1 = {data.baseline}",
        (ticks[0], 1),
        xytext=(0, -4),
        textcoords="offset points",
        va="top",
        fontsize=8.5,
    )
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("concurrency")
    axes.set_ylabel(f"throughput ÷ {data.baseline}")
    label_lines(axes, ends)
    return figure


def _ratios(point: SweepPoint, other: SweepPoint) -> list[float]:
    """Ratios to the baseline by repeat: equal repeats ran close together in time."""
    theirs = {run.repeat: run.values.get("output_throughput") for run in other.runs}
    return [
        mine / base
        for run in point.runs
        if (mine := run.values.get("output_throughput")) and (base := theirs.get(run.repeat))
    ]


def draw_histogram(data: ChartData) -> Figure | None:
    """Histogram of tokens emitted per verify step, one panel per configuration."""
    profiles = list(data.profiles.items())
    if not profiles:
        return None
    figure, panels = new_chart(columns=len(profiles), height=3.4)
    for axes, (name, profile) in zip(panels, profiles, strict=True):
        total = sum(profile.histogram)
        sizes = range(1, len(profile.histogram) + 1)
        shares = [count / total for count in profile.histogram]
        colour = data.looks[name].colour
        axes.bar(list(sizes), shares, color=colour, width=0.8)
        tau = profile.acceptance_length
        axes.axvline(tau, color=INK, linewidth=1, linestyle=(0, (4, 3)))
        axes.set_title(f"{name}\nτ = {tau:.2f}", color=colour, fontsize=9.5)
        step = max(1, len(profile.histogram) // 8)
        axes.set_xticks(list(sizes)[::step])
        axes.grid(axis="x", visible=False)
        axes.set_xlabel("tokens emitted by a step")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    panels[0].set_ylabel("share of verify steps")
    return figure


def draw_positions(data: ChartData) -> Figure | None:
    """Conditional acceptance along the block."""
    if not data.profiles:
        return None
    figure, (axes,) = new_chart(height=3.8)
    longest = 1
    # Short blocks are drawn last: longer ones have the same beginning and would hide them.
    by_length = sorted(data.profiles.items(), key=lambda item: -len(item[1].conditional))
    for name, profile in by_length:
        look = data.looks[name]
        known = [(j, a) for j, a in enumerate(profile.conditional, start=1) if a is not None]
        if not known:
            continue
        xs, ys = zip(*known, strict=True)
        axes.plot(xs, ys, f"-{look.marker}", color=look.colour)
        longest = max(longest, xs[-1])
    axes.set_ylim(0, 1.03)
    axes.set_xticks(range(1, longest + 1, max(1, longest // 16)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_xlabel("draft position in the block")
    axes.set_ylabel("accepted, given all before it were")
    name_row(axes, data.looks, list(data.profiles))
    return figure


def draw_bands(data: ChartData, tag: str, label: str) -> Figure | None:
    """A request metric in ms by load: p5-p95 as a thin line, p25-p75 as a thick one, its median."""
    loads = sorted({point.load for point in data.points}, key=lambda load: load.order)
    figure, (axes,) = new_chart()
    drawn: list[str] = []
    spacing = min(0.8 / max(len(data.names), 1), 0.22)
    for number, name in enumerate(data.names):
        look = data.looks[name]
        for point in data.points:
            values = [point.quantile(tag, statistic) for statistic in _BAND]
            known = [value * 1e3 for value in values if value is not None]
            if point.configuration != name or len(known) != len(_BAND):
                continue
            x = loads.index(point.load) + (number - (len(data.names) - 1) / 2) * spacing
            axes.vlines(x, known[0], known[4], color=look.colour, linewidth=1.1)
            axes.vlines(x, known[1], known[3], color=look.colour, linewidth=4.5, alpha=0.55)
            axes.plot([x], [known[2]], look.marker, color=look.colour, markersize=5)
            drawn.append(name)
    if not drawn:
        return None
    names = [name for name in data.names if name in drawn]
    log_axis(axes)
    axes.grid(axis="x", visible=False)
    axes.set_xticks(range(len(loads)), [_short(load) for load in loads])
    axes.set_xlabel("concurrency" if all(load.concurrency for load in loads) else "load")
    axes.set_ylabel(f"{label}, ms")
    name_row(axes, data.looks, names)
    return figure

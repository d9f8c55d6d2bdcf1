"""The content of a report before it becomes HTML or Markdown: charts, tables, answers, notes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from dflash_perf.front import Front
from dflash_perf.harness.interactivity import SweepAnswer, answer, build_fronts, throughput_unit
from dflash_perf.harness.load_metrics import (
    REQUEST_METRICS,
    RUN_METRICS,
    AcceptanceProfile,
    definition,
)
from dflash_perf.harness.points import SweepPoint
from dflash_perf.harness.store import ResultStore
from dflash_perf.report import charts
from dflash_perf.report.charts import ChartData
from dflash_perf.report.report_tables import (
    Table,
    answer_table,
    configuration_table,
    failure_table,
    format_number,
    point_table,
    set_table,
)
from dflash_trt.errors import DflashError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Names may hold commas.
JOIN = " · "
ALIKE = 1.03
"""Throughputs so close are the same: machines' noise is of that size."""


@dataclass(frozen=True, slots=True)
class Chart:
    """A figure of the report.

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """Everything that a page shows."""

    title: str
    subtitle: str
    headline: str | None
    answers: Table | None
    charts: tuple[Chart, ...]
    points: Table
    sets: Table | None
    configurations: Table
    failures: Table | None
    notes: tuple[str, ...]
    settings: tuple[tuple[str, str], ...]
    machine: tuple[tuple[str, str], ...]
    definitions: tuple[str, ...]
    commands: tuple[str, ...]


def gather(store: ResultStore, targets: Sequence[float], baseline: str | None) -> Content:
    """The content of a report on `store`.

    Args:
        targets: interactivities to answer for; the first is marked in the chart. If empty, one
            that every configuration reaches is chosen.
        baseline: a configuration's name; by default that of the sweep.

    Raises:
        DflashError: no finished run, or no such configuration.
    """
    plan, runs, points = store.plan(), store.runs(), store.points()
    if not points:
        raise DflashError("holds no finished run", where=store.folder, usage=True)
    config = plan["config"]
    names = list(dict.fromkeys(point.configuration for point in points))
    base = baseline or config["baseline"] or config["configurations"][0]["name"]
    if baseline is not None and baseline not in names:
        raise DflashError(
            f"has no configuration {baseline!r}, but {', '.join(names)}",
            where=store.folder,
            usage=True,
        )
    profiles: dict[str, AcceptanceProfile] = {}
    for name in names:
        requests = [one for run in runs if run.configuration == name for one in store.requests(run)]
        if (profile := AcceptanceProfile.of(requests)) is not None:
            profiles[name] = profile
    chosen = list(targets) or choose_interactivity(build_fronts(points), base)
    answers = [answer(points, target, base) for target in chosen]
    data = ChartData(points, base, profiles, answers[0] if answers else None)
    unit = throughput_unit(points)
    servers = plan.get("servers", {})
    return Content(
        title="Sweep: " + (JOIN.join(names) if len(names) < 5 else f"{len(names)} configurations"),
        subtitle=_subtitle(plan, points),
        headline=_headline(answers, points, chosen_here=not targets),
        answers=answer_table(answers, unit),
        charts=tuple(_draw(data, unit)),
        points=point_table(points, unit),
        sets=set_table(points),
        configurations=configuration_table(config, servers),
        failures=failure_table(points),
        notes=(*_twins(points), *_notes(points)),
        settings=tuple(_settings(config, points)),
        machine=tuple(_machine(plan)),
        definitions=(
            *map(definition, REQUEST_METRICS.values()),
            *map(definition, RUN_METRICS.values()),
        ),
        commands=tuple(one["command"] for one in plan["commands"]),
    )


def choose_interactivity(fronts: dict[str, Front], baseline: str) -> list[float]:
    """One that every configuration reaches: the middle of what all fronts cover, or, where they
    part, the most that all reach; the baseline's own range is kept to. Empty without fronts."""
    known = {name: front.points for name, front in fronts.items() if front.points}
    if not known:
        return []
    reached = min(points[-1].interactivity for points in known.values())
    covered = max(points[0].interactivity for points in known.values())
    chosen = (covered * reached) ** 0.5 if covered < reached else reached
    least = covered if covered < reached else 0.99 * reached
    if baseline in known:  # below its range nothing is known of it, and so of any ratio
        least = max(least, known[baseline][0].interactivity)
    return [_rounded(max(chosen, least), least, reached)]


def _rounded(value: float, least: float, most: float) -> float:
    """With as few digits, two or more, as lie between the bounds; rounded down where it must be."""
    for digits in (2, 3, 4, 5, 6):
        nearest = float(f"{value:.{digits}g}")
        unit = 10.0 ** (math.floor(math.log10(value)) + 1 - digits)
        for rounded in (nearest, float(f"{nearest - unit:.{digits}g}")):
            if least <= rounded <= most:
                return rounded
    return value


def _subtitle(plan: dict[str, Any], points: Sequence[SweepPoint]) -> str:
    repeats = {len(point.runs) for point in points}
    runs = f"{min(repeats)} runs" if len(repeats) == 1 else f"{min(repeats)} to {max(repeats)} runs"
    return (
        f"begun {plan['began'][:10]}; {len(points)} points of {runs} each, "
        f"{sum(point.requests for point in points):,} requests"
    )


def _headline(
    answers: Sequence[SweepAnswer], points: Sequence[SweepPoint], *, chosen_here: bool
) -> str | None:
    """The answer in a sentence or two: throughput at an interactivity, speed for one user."""
    if not answers:
        return None
    first = answers[0]
    ratios = {name: ratio for name in first.values if (ratio := first.ratio(name)) is not None}
    others = {name: ratio for name, ratio in ratios.items() if name != first.baseline}
    at = f"At {first.interactivity:g} tokens/s per user"
    if others:
        name = max(others, key=lambda key: others[key])
        least = "at least " if first.is_least(name) else ""
        text = f"{at}, {name} gives {least}{others[name]:.2f} × the throughput of {first.baseline}."
    else:
        found = [name for name, value in first.values.items() if value is not None]
        measured = f"only {JOIN.join(found)} measured" if found else "nothing measured"
        text = f"{at}, {measured}: no ratio to {first.baseline}."
    alone = _alone(points, first.baseline)
    if alone:
        name = max(alone, key=lambda key: alone[key])
        text += f" One user alone reads {alone[name]:.2f} × as fast with {name}."
    if chosen_here:
        text += " (Chosen by this report: an interactivity that every configuration reaches.)"
    return text


def _alone(points: Sequence[SweepPoint], baseline: str) -> dict[str, float]:
    """Interactivity ÷ the baseline's with one sequence at a time, of every other configuration."""
    found = {
        point.configuration: point.interactivity
        for point in points
        if point.load.concurrency == 1 and point.interactivity
    }
    base = found.pop(baseline, None)
    return {} if base is None else {name: value / base for name, value in found.items()}


def _twins(points: Sequence[SweepPoint]) -> list[str]:
    """Notes on configurations whose throughput is the same at every load, within ALIKE."""
    measured: dict[str, dict[str, float]] = {}
    for point in points:
        if point.throughput is not None:
            measured.setdefault(point.configuration, {})[point.load.label] = point.throughput.mean
    notes = []
    for (one, mine), (other, theirs) in combinations(measured.items(), 2):
        ratios = [mine[load] / theirs[load] for load in mine.keys() & theirs.keys()]
        if ratios and all(1 / ALIKE <= ratio <= ALIKE for ratio in ratios):
            notes.append(
                f"{one} and {other} turned out the same: at every load throughputs lie within "
                f"{ALIKE - 1:.0%} of each other."
            )
    return notes


def _draw(data: ChartData, unit: str) -> list[Chart]:
    drafted = JOIN.join(f"{name} {p.acceptance_length:.2f}" for name, p in data.profiles.items())
    is_partial = any(profile.conditional_basis == "histogram" for profile in data.profiles.values())
    wanted: list[tuple[str, str, str, str, Callable[[ChartData], Figure | None]]] = [
        (
            "front",
            "Throughput against interactivity",
            f"Interactivity = 1 / median TPOT. Throughput = output {unit}, mean and range of the "
            "repeats; no input tokens in it. Numbers at points are concurrency (or requests/s). "
            "The curve is a monotone cubic through the Pareto front, not continued past its ends; "
            "pale points are beaten in both. A ring marks the chosen interactivity.",
            f"Pareto fronts of {JOIN.join(data.names)}.",
            charts.draw_fronts,
        ),
        (
            "speedup",
            "Speed-up against concurrency",
            f"Output throughput ÷ that of {data.baseline} at the same concurrency, repeat by "
            "repeat: mean and range.",
            f"Throughput relative to {data.baseline}, by concurrency.",
            charts.draw_speedup,
        ),
        (
            "acceptance-histogram",
            "Tokens per verify step",
            "τ (dashed) = tokens emitted by verify steps / steps, bonus token included, over all "
            "runs of a configuration.",
            f"Histograms of tokens per step; acceptance length: {drafted}.",
            charts.draw_histogram,
        ),
        (
            "acceptance-by-position",
            "Acceptance along the block",
            "Share of drafts accepted at a position, given that all before it in their block were."
            + (
                " From the histogram: a last step that a limit cut short counts as a rejection."
                if is_partial
                else ""
            ),
            "Conditional acceptance by draft position.",
            charts.draw_positions,
        ),
    ]
    for tag, name, formula in (
        ("ttft", "time to first token", "Request sent → first text."),
        ("tpot", "time per output token", "(E2E - TTFT) / (output tokens - 1), of each request."),
    ):
        caption = f"{formula} Mark: median; thick: 25 to 75 %; thin: 5 to 95 % of requests."
        alternative = f"Distribution of the {name} by load."
        draw_bands = partial(charts.draw_bands, tag=tag, label=name)
        wanted.append((tag, name.capitalize(), f"{caption} Logarithmic.", alternative, draw_bands))
    return [
        Chart(key, title, caption, alternative, figure)
        for key, title, caption, alternative, draw in wanted
        if (figure := draw(data)) is not None
    ]


def _notes(points: Sequence[SweepPoint]) -> list[str]:
    notes = [
        f"{point.configuration}, {point.load.label}: {note}"
        for point in points
        for note in point.notes
    ]
    by_source: dict[str, dict[str, None]] = {}
    for point in points:
        for source in (source for run in point.runs for source in run.token_sources):
            by_source.setdefault(source, {})[point.configuration] = None
    shown = {
        "output_ids": "the server's token ids",
        "counts": "the server's own count",
        "tokenizer": "the tokenizer",
    }
    for source, names in by_source.items():
        notes.append(f"Tokens of {JOIN.join(names)} are counted by {shown.get(source, source)}.")
    if len({len(point.runs) for point in points}) == 1 and len(points[0].runs) == 1:
        notes.append("Every point is a single run: no confidence can be given.")
    return notes


def _settings(config: dict[str, Any], points: Sequence[SweepPoint]) -> list[tuple[str, str]]:
    own = f"the prompts' own, {format_number(points[0].quantile('input_tokens', 'avg'))} on average"
    limits = {key: value for key, value in config["goodput"].items() if value is not None}
    most = "" if config["ignore_eos"] else "at most "
    if config.get("prompts"):
        prompts = f"sets {JOIN.join(config['prompts'])}"
    else:
        prompts = f"{PurePath(config['input_file']).name} ({config['dataset']})"
    shown = [
        ("prompts", prompts),
        ("input tokens", str(config["isl"] or own)),
        ("output tokens", f"{most}{config['osl']}"),
        (
            "sampling",
            f"temperature {config['temperature']:g}, top_p {config['top_p']:g}, "
            f"top_k {config['top_k'] or 'off'}, seed {config['seed']}",
        ),
    ]
    if limits:
        text = ", ".join(f"{key} ≤ {value:g} ms" for key, value in limits.items())
        shown.append(("goodput limits", text))
    return shown


def _machine(plan: dict[str, Any]) -> list[tuple[str, str]]:
    machine = plan["machine"]
    libraries = ", ".join(f"{name} {version}" for name, version in machine["libraries"].items())
    return [
        ("client's processor", f"{machine['processor']}, {machine['cores']} cores"),
        ("memory", f"{machine['memory_gib']} GiB"),
        ("system", f"{machine['system']}, Python {machine['python']}"),
        ("libraries", libraries),
        ("prompts (sha256)", plan["prompts_sha256"]),
    ]

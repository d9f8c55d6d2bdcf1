"""What a report says, before it is HTML or Markdown: figures, tables, answers, caveats."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from dflash_perf.front import Front
from dflash_perf.harness.acceptance import AcceptanceProfile
from dflash_perf.harness.answers import (
    NOT_MEASURED,
    Answer,
    answer,
    build_fronts,
    describe_bracket,
    throughput_unit,
)
from dflash_perf.harness.config import Goodput
from dflash_perf.harness.distribution import Spread
from dflash_perf.harness.metrics import REQUEST_METRICS, definition, run_metrics
from dflash_perf.harness.points import Point
from dflash_perf.harness.store import ResultStore
from dflash_perf.report import charts
from dflash_perf.report.charts import ChartData
from dflash_trt.errors import DflashError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DASH = "–"
# Names may hold commas.
JOIN = " · "


@dataclass(frozen=True, slots=True)
class Chart:
    """A figure of the report.

    Args:
        key: its name in files and anchors.
        caption: what it shows, with the definition of its figures.
        alternative: the same in words, for who cannot see it.
    """

    key: str
    title: str
    caption: str
    alternative: str
    figure: Figure


@dataclass(frozen=True, slots=True)
class Table:
    """Cells as text; the first `words` columns are words, the others numbers."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """Everything that a page shows."""

    title: str
    subtitle: str
    headline: str | None
    answers: Table | None
    charts: tuple[Chart, ...]
    points: Table
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
        targets: interactivities to answer for; the first is marked in the chart. With none, one
            that most fronts cover is chosen.
        baseline: a configuration's name; by default the sweep's own.

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
        profile = AcceptanceProfile.of(requests)
        if profile is not None:
            profiles[name] = profile
    chosen = list(targets) or choose_interactivity(build_fronts(points), base)
    answers = [answer(points, target, base) for target in chosen]
    data = ChartData(points, base, profiles, answers[0] if answers else None)
    unit = throughput_unit(points)
    servers = plan.get("servers", {})
    return Content(
        title="Sweep: " + (JOIN.join(names) if len(names) < 5 else f"{len(names)} configurations"),
        subtitle=_subtitle(plan, points),
        headline=_headline(answers, unit, chosen_here=not targets),
        answers=_answer_table(answers, unit),
        charts=tuple(_draw(data, unit)),
        points=_point_table(points, unit),
        configurations=_configuration_table(config, servers),
        failures=_failure_table(points),
        notes=tuple(_notes(points, profiles)),
        settings=tuple(_settings(config, points)),
        machine=tuple(_machine(plan)),
        definitions=tuple(
            [definition(metric) for metric in REQUEST_METRICS]
            + [definition(metric) for metric in run_metrics(Goodput())]
        ),
        commands=tuple(one["command"] for one in plan["commands"]),
    )


def choose_interactivity(fronts: dict[str, Front], baseline: str) -> list[float]:
    """The middle of a range that many fronts cover, the baseline's and others' if it can be."""
    ranges = {
        name: (front.points[0].interactivity, front.points[-1].interactivity)
        for name, front in fronts.items()
        if len(front.points) > 1
    }
    best: tuple[bool, int, float] | None = None
    edges = sorted({edge for ends in ranges.values() for edge in ends})
    for low, high in pairwise(edges):
        middle = (low * high) ** 0.5
        covering = [name for name, (start, end) in ranges.items() if start <= middle <= end]
        found = (baseline in covering and len(covering) > 1, len(covering), middle)
        if covering and (best is None or found[:2] > best[:2]):
            best = found
    return [] if best is None else [float(f"{best[2]:.2g}")]


def _subtitle(plan: dict[str, Any], points: Sequence[Point]) -> str:
    repeats = {len(point.runs) for point in points}
    runs = f"{min(repeats)} runs" if len(repeats) == 1 else f"{min(repeats)} to {max(repeats)} runs"
    return (
        f"begun {plan['began'][:10]}; {len(points)} points of {runs} each, "
        f"{sum(point.requests for point in points):,} requests"
    )


def _headline(answers: Sequence[Answer], unit: str, *, chosen_here: bool) -> str | None:
    if not answers:
        return None
    first = answers[0]
    ratios = {name: ratio for name in first.values if (ratio := first.ratio(name)) is not None}
    others = {name: ratio for name, ratio in ratios.items() if name != first.baseline}
    at = f"At {first.interactivity:g} tokens/s per user"
    if others:
        name = max(others, key=lambda key: others[key])
        text = f"{at}, {name} gives {others[name]:.2f} × the throughput of {first.baseline}."
    else:
        found = [name for name, value in first.values.items() if value is not None]
        measured = f"only {JOIN.join(found)} measured" if found else "nothing measured"
        text = f"{at}, {measured}: no ratio to {first.baseline}."
    if chosen_here:
        text += " (Chosen by this report: the middle of a range that several fronts cover.)"
    return text


def _answer_table(answers: Sequence[Answer], unit: str) -> Table | None:
    rows: list[tuple[str, ...]] = []
    for one in answers:
        for name, value in one.values.items():
            ratio = one.ratio(name)
            rows.append(
                (
                    name,
                    f"{one.interactivity:g}",
                    NOT_MEASURED if value is None else f"{value.throughput:,.0f}",
                    DASH if ratio is None else f"{ratio:.2f}",
                    DASH if value is None else describe_bracket(value),
                )
            )
    header = (
        "configuration",
        "tokens/s per user",
        unit,
        f"÷ {answers[0].baseline}" if answers else "ratio",
        "measured points around it",
    )
    return Table(header, tuple(rows)) if rows else None


def _draw(data: ChartData, unit: str) -> list[Chart]:
    drafted = JOIN.join(
        f"{name} {sum(i * n for i, n in enumerate(p.histogram, 1)) / sum(p.histogram):.2f}"
        for name, p in data.profiles.items()
    )
    partial = any(profile.basis == "histogram" for profile in data.profiles.values())
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
                if partial
                else ""
            ),
            "Conditional acceptance by draft position.",
            charts.draw_positions,
        ),
        (
            "ttft",
            "Time to first token",
            "Request sent → first text. Mark: median; thick: 25 to 75 %; thin: 5 to 95 % of "
            "requests. Logarithmic.",
            "Distribution of the time to first token by load.",
            charts.draw_first_token,
        ),
        (
            "tpot",
            "Time per output token",
            "(E2E - TTFT) / (output tokens - 1), of each request. Mark: median; thick: 25 to 75 %; "
            "thin: 5 to 95 % of requests. Logarithmic.",
            "Distribution of the time per output token by load.",
            charts.draw_per_token,
        ),
    ]
    drawn: list[Chart] = []
    for key, title, caption, alternative, draw in wanted:
        figure = draw(data)
        if figure is not None:
            drawn.append(Chart(key, title, caption, alternative, figure))
    return drawn


def _point_table(points: Sequence[Point], unit: str) -> Table:
    header = (
        "configuration",
        "load",
        "interactivity",
        unit,
        "TTFT p50, ms",
        "TTFT p99, ms",
        "TPOT p50, ms",
        "TPOT p99, ms",
        "E2E p50, ms",
        "end-to-end rate p50",
        "goodput, req/s",
        "τ",
        "requests",
        "failed",
        "client CPU",
    )
    return Table(header, tuple(_point_row(point) for point in points), words=2)


def _point_row(point: Point) -> tuple[str, ...]:
    cpu = point.value("client_cpu_share")
    return (
        point.configuration,
        point.load.label,
        _number(point.interactivity),
        _spread(point.throughput),
        *(
            _number(point.quantile(tag, statistic), 1e3)
            for tag, statistic in (
                ("ttft", "p50"),
                ("ttft", "p99"),
                ("tpot", "p50"),
                ("tpot", "p99"),
                ("e2e", "p50"),
            )
        ),
        _number(point.quantile("end_to_end_rate", "p50")),
        _spread(point.value("goodput")),
        _spread(point.value("acceptance_length")),
        f"{point.requests:,}",
        f"{point.failed:,}",
        DASH if cpu is None else f"{cpu.mean:.0%}",
    )


def _number(value: float | None, scale: float = 1) -> str:
    if value is None:
        return DASH
    value *= scale
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _spread(spread: Spread | None) -> str:
    if spread is None:
        return DASH
    half = spread.half_width
    return _number(spread.mean) + ("" if half is None else f" ± {_number(half)}")


def _configuration_table(config: dict[str, Any], servers: dict[str, Any]) -> Table:
    rows: list[tuple[str, ...]] = []
    for one in config["configurations"]:
        server = servers.get(one["name"], {})
        told = {**server.get("parameters", {}), **one["inputs"], **one["parameters"]}
        rows.append(
            (
                one["name"],
                one["kind"],
                one["model"],
                # Without its scheme: a report links to nothing.
                one["url"].split("://")[-1],
                str(server.get("server", DASH)),
                str(one["hardware"] or DASH) + (f", {one['gpus']} GPUs" if one["gpus"] else ""),
                ", ".join(f"{key} {value}" for key, value in told.items()) or DASH,
            )
        )
    header = ("configuration", "kind", "model", "address", "server", "hardware", "parameters")
    return Table(header, tuple(rows), words=len(header))


def _failure_table(points: Sequence[Point]) -> Table | None:
    rows: list[tuple[str, ...]] = []
    for point in points:
        totals: dict[str, int] = {}
        for run in point.runs:
            for message, count in run.errors.items():
                totals[message] = totals.get(message, 0) + count
        rows += [
            (point.configuration, point.load.label, message, f"{count:,}", f"{point.requests:,}")
            for message, count in totals.items()
        ]
    header = ("configuration", "load", "error", "requests", "of")
    return Table(header, tuple(rows), words=3) if rows else None


def _notes(points: Sequence[Point], profiles: dict[str, AcceptanceProfile]) -> list[str]:
    notes = [
        f"{point.configuration}, {point.load.label}: {note}"
        for point in points
        for note in point.notes
    ]
    by_source: dict[str, list[str]] = {}
    for point in points:
        for run in point.runs:
            for source in run.token_sources:
                named = by_source.setdefault(source, [])
                if point.configuration not in named:
                    named.append(point.configuration)
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


def _settings(config: dict[str, Any], points: Sequence[Point]) -> list[tuple[str, str]]:
    isl = points[0].quantile("input_tokens", "avg")
    limits = {key: value for key, value in config["goodput"].items() if value is not None}
    shown = [
        ("prompts", f"{PurePath(config['input_file']).name} ({config['dataset']})"),
        (
            "input tokens",
            f"{config['isl']}" if config["isl"] else f"the prompts' own, {_number(isl)} on average",
        ),
        (
            "output tokens",
            f"{config['osl']}" if config["ignore_eos"] else f"at most {config['osl']}",
        ),
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

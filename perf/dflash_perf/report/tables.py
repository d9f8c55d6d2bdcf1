"""The tables of a report: cells as text, ready for HTML or Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dflash_perf.harness.answers import NOT_MEASURED, Answer, describe_bracket
from dflash_perf.harness.distribution import Spread
from dflash_perf.harness.points import SweepPoint

DASH = "–"


@dataclass(frozen=True, slots=True)
class Table:
    """Cells as text; the first `words` columns are words, the others numbers."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: int = 1


def answer_table(answers: Sequence[Answer], unit: str) -> Table | None:
    """Throughput at each interactivity, with its brackets; None without answers."""
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
                    one.describe_missing(name) if value is None else describe_bracket(value),
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


def point_table(points: Sequence[SweepPoint], unit: str) -> Table:
    """Every point's figures."""

    def quantile(tag: str, rank: str, scale: float = 1e3) -> Callable[[SweepPoint], str]:
        return lambda point: format_number(point.quantile(tag, rank), scale)

    columns: dict[str, Callable[[SweepPoint], str]] = {
        "configuration": lambda point: point.configuration,
        "load": lambda point: point.load.label,
        "interactivity": lambda point: format_number(point.interactivity),
        unit: lambda point: format_spread(point.throughput),
        "TTFT p50, ms": quantile("ttft", "p50"),
        "TTFT p99, ms": quantile("ttft", "p99"),
        "TPOT p50, ms": quantile("tpot", "p50"),
        "TPOT p99, ms": quantile("tpot", "p99"),
        "E2E p50, ms": quantile("e2e", "p50"),
        "end-to-end rate p50": quantile("end_to_end_rate", "p50", 1),
        "goodput, req/s": lambda point: format_spread(point.value("goodput")),
        "τ": lambda point: format_spread(point.value("acceptance_length")),
        "requests": lambda point: f"{point.requests:,}",
        "failed": lambda point: f"{point.failed:,}",
        "client CPU": lambda point: _percent(point.value("client_cpu_share")),
    }
    rows = [tuple(show(point) for show in columns.values()) for point in points]
    return Table(tuple(columns), tuple(rows), words=2)


def _percent(share: Spread | None) -> str:
    return DASH if share is None else f"{share.mean:.0%}"


def format_number(value: float | None, scale: float = 1) -> str:
    """Three digits, or all before the point; a dash for what was not measured."""
    if value is None:
        return DASH
    value *= scale
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def format_spread(spread: Spread | None) -> str:
    """The mean, ± half of its confidence interval where there is one."""
    if spread is None:
        return DASH
    half = spread.half_width
    return format_number(spread.mean) + ("" if half is None else f" ± {format_number(half)}")


def configuration_table(config: dict[str, Any], servers: dict[str, Any]) -> Table:
    """What was asked, where, and what the server says about itself."""
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


def failure_table(points: Sequence[SweepPoint]) -> Table | None:
    """Errors by point; None without any."""
    rows: list[tuple[str, ...]] = []
    for point in points:
        totals = sum((Counter(run.errors) for run in point.runs), Counter[str]())
        rows += [
            (point.configuration, point.load.label, message, f"{count:,}", f"{point.requests:,}")
            for message, count in totals.items()
        ]
    header = ("configuration", "load", "error", "requests", "of")
    return Table(header, tuple(rows), words=3) if rows else None

"""The tables of a report: cells as text, ready for HTML, Markdown or a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dflash_perf.harness.interactivity import NOT_MEASURED, SweepAnswer
from dflash_perf.harness.load_metrics import Spread
from dflash_perf.harness.points import SweepPoint
from dflash_trt.core.text_table import columns

DASH = "–"
_TIMES = (("ttft", "p50"), ("ttft", "p99"), ("tpot", "p50"), ("tpot", "p99"), ("e2e", "p50"))


@dataclass(frozen=True, slots=True)
class Table:
    """Cells as text; the first `words` columns are text (left-aligned), the others numbers."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: int = 1

    @staticmethod
    def of(rows: Sequence[Mapping[str, str]], words: int = 1) -> Table:
        """A table of rows that map heading to cell; all have the same headings."""
        return Table(tuple(rows[0]), tuple(tuple(row.values()) for row in rows), words)


def text_lines(table: Table) -> list[str]:
    """The table for a terminal."""
    return [line.rstrip() for line in columns([table.header, *table.rows], table.words)]


def answer_table(
    answers: Sequence[SweepAnswer], unit: str, taus: Mapping[str, float]
) -> Table | None:
    """Throughput at each interactivity, with the points around it; None without answers."""
    rows = []
    for one in answers:
        for name, value in one.values.items():
            ratio, sign = one.ratio(name), "" if value is None else value.sign
            cells = {
                "configuration": name,
                "tokens/s per user": f"{one.interactivity:.4g}",
                unit: NOT_MEASURED if value is None else f"{sign}{value.throughput:,.0f}",
                f"÷ {one.baseline}": DASH if ratio is None else sign + format_ratio(ratio),
                "τ of all loads": format_ratio(taus.get(name)),
                "measured points around it": one.describe(name),
            }
            rows.append(cells)
    return Table.of(rows) if rows else None


def point_table(points: Sequence[SweepPoint], unit: str) -> Table:
    """Every point's figures."""
    rows = []
    for point in points:
        share = point.value("client_cpu_share")
        cells = {
            "configuration": point.configuration,
            "load": point.load.label,
            "interactivity": format_number(point.interactivity),
            unit: format_spread(point.throughput),
            **{
                f"{tag.upper()} {rank}, ms": format_number(point.quantile(tag, rank), 1e3)
                for tag, rank in _TIMES
            },
            "goodput, req/s": format_spread(point.value("goodput")),
            "τ": format_spread(point.value("acceptance_length")),
            "requests": f"{point.requests:,}",
            "failed": f"{point.failed:,}",
            "client CPU": DASH if share is None else f"{share.mean:.0%}",
        }
        rows.append(cells)
    return Table.of(rows, words=2)


def set_table(points: Sequence[SweepPoint]) -> Table | None:
    """The figures of each named set of prompts; None where there are not several."""
    rows = []
    for point in points:
        for name in point.set_names if len(point.set_names) > 1 else ():
            parts = point.of_set(name)
            cells = {
                "configuration": point.configuration,
                "load": point.load.label,
                "set": name,
                "interactivity": format_spread(point.set_value(name, "interactivity")),
                "τ": format_spread(point.set_value(name, "acceptance_length")),
                "output tokens": f"{sum(one.output_tokens for one in parts):,}",
                "verify steps": f"{sum(one.verify_steps for one in parts):,}",
                "requests": f"{sum(one.requests for one in parts):,}",
                "failed": f"{sum(one.requests - one.completed for one in parts):,}",
                "looping": f"{sum(one.looping or 0 for one in parts):,}",
            }
            rows.append(cells)
    return Table.of(rows, words=3) if rows else None


def format_ratio(ratio: float | None) -> str:
    """Two decimals; a dash for none."""
    return DASH if ratio is None else f"{ratio:.2f}"


def format_number(value: float | None, scale: float = 1) -> str:
    """Three significant digits, whole numbers from 1000 on; a dash for None."""
    if value is None:
        return DASH
    value *= scale
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def format_spread(spread: Spread | None) -> str:
    """The mean ± half of its confidence interval, if it has one."""
    if spread is None:
        return DASH
    half = spread.confidence_95_half_width
    return format_number(spread.mean) + ("" if half is None else f" ± {format_number(half)}")


def configuration_table(config: dict[str, Any], servers: dict[str, Any]) -> Table:
    """Each configuration: its server and address, and its parameters."""
    rows = []
    for one in config["configurations"]:
        server, gpus = servers.get(one["name"], {}), f", {one['gpus']} GPUs" if one["gpus"] else ""
        told = {**server.get("parameters", {}), **one["inputs"], **one["parameters"]}
        cells = {
            "configuration": one["name"],
            "kind": one["kind"],
            "model": one["model"],
            "address": one["url"].split("://")[-1],  # no scheme: a report links to nothing
            "server": str(server.get("server", DASH)),
            "hardware": str(one["hardware"] or DASH) + gpus,
            "parameters": ", ".join(f"{key} {value}" for key, value in told.items()) or DASH,
        }
        rows.append(cells)
    return Table.of(rows, words=len(cells))


def failure_table(points: Sequence[SweepPoint]) -> Table | None:
    """Errors by point; None if no request failed."""
    rows: list[tuple[str, ...]] = []
    for point in points:
        totals = sum((Counter(run.errors) for run in point.runs), Counter[str]())
        rows += [
            (point.configuration, point.load.label, message, f"{count:,}", f"{point.requests:,}")
            for message, count in totals.items()
        ]
    header = ("configuration", "load", "error", "requests", "of")
    return Table(header, tuple(rows), words=3) if rows else None

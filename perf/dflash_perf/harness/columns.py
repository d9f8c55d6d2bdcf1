"""CSV with aiperf's names for the same figures, so that scripts written for aiperf can read it.

aiperf takes percentiles of rates; this project takes them of seconds per token and inverts last.
So `output_token_throughput_per_user` at p50 is the interactivity here, but its avg is not.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence

from dflash_perf.harness.distribution import PERCENTILES, describe
from dflash_perf.harness.metrics import tpot
from dflash_perf.harness.points import RunSummary, SweepPoint
from dflash_perf.harness.records import RunRecord

STATISTICS = ("avg", "min", "max", *(f"p{rank}" for rank in PERCENTILES), "std")
# (aiperf's tag, aiperf's title with the unit, our tag, factor from our unit to aiperf's)
_DISTRIBUTIONS = (
    ("time_to_first_token", "Time to First Token (ms)", "ttft", 1e3),
    ("request_latency", "Request Latency (ms)", "e2e", 1e3),
    ("inter_token_latency", "Inter Token Latency (ms)", "tpot", 1e3),
    ("output_sequence_length", "Output Sequence Length (tokens)", "output_tokens", 1),
    ("input_sequence_length", "Input Sequence Length (tokens)", "input_tokens", 1),
)
_PER_USER = "Output Token Throughput Per User (tokens/sec/user)"
_VALUES = (
    ("output_throughput", "output_token_throughput", "Output Token Throughput (tokens/sec)"),
    ("request_throughput", "request_throughput", "Request Throughput (requests/sec)"),
    ("goodput", "goodput", "Goodput (requests/sec)"),
)


def run_csv(run: RunRecord, summary: RunSummary) -> str:
    """One run in the layout of aiperf's export: distributions, an empty line, single values."""
    table = [["Metric", *STATISTICS]]
    for _, title, tag, scale in _DISTRIBUTIONS:
        if numbers := summary.distributions.get(tag):
            table.append([title, *(f"{numbers[key] * scale:.4f}" for key in STATISTICS)])
        if tag == "tpot":
            rates = [1 / value for one in run.completed if (value := tpot(one))]
            if rates:
                numbers = describe(rates)
                table.append([_PER_USER, *(f"{numbers[key]:.4f}" for key in STATISTICS)])
    table += [[], ["Metric", "Value"], ["Benchmark Duration (sec)", f"{summary.window_s:.4f}"]]
    table.append(["Request Count (requests)", str(summary.completed)])
    table.append(["Error Request Count (requests)", str(summary.requests - summary.completed)])
    for tag, _, title in _VALUES:
        if tag in summary.values:
            table.append([title, f"{summary.values[tag]:.4f}"])
    return _to_csv(table)


def points_csv(points: Iterable[SweepPoint]) -> str:
    """One row per point, means over its repeats; columns are aiperf's tags plus the statistic."""
    rows = [_point_row(point) for point in points]
    header = list(dict.fromkeys(key for row in rows for key in row))
    return _to_csv([header, *([row.get(key, "") for key in header] for row in rows)])


def _point_row(point: SweepPoint) -> Mapping[str, str]:
    row = {
        "configuration": point.configuration,
        "concurrency": "" if point.load.concurrency is None else str(point.load.concurrency),
        "request_rate": "" if point.load.request_rate is None else f"{point.load.request_rate:g}",
        "repeats": str(len(point.runs)),
        "request_count": str(point.requests - point.failed),
        "error_request_count": str(point.failed),
    }
    for name, _, tag, scale in _DISTRIBUTIONS:
        for statistic in STATISTICS:
            row[f"{name}_{statistic}"] = _figure(point.quantile(tag, statistic), scale)
    row["output_token_throughput_per_user_p50"] = _figure(point.interactivity)
    shown = {ours: theirs for ours, theirs, _ in _VALUES}
    tags = sorted({tag for run in point.runs for tag in run.values} - {"interactivity"})
    for tag in [*shown, *(tag for tag in tags if tag not in shown)]:
        spread, name = point.value(tag), shown.get(tag, tag)
        row[name] = _figure(spread.mean if spread else None)
        if spread is not None and spread.half_width is not None:
            row[f"{name}_confidence_95"] = _figure(spread.half_width)
    return row


def _figure(value: float | None, scale: float = 1) -> str:
    return "" if value is None else f"{value * scale:.6g}"


def _to_csv(table: Iterable[Sequence[str]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(table)
    return text.getvalue()

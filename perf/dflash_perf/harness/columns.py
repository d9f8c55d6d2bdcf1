"""CSV with aiperf's names for the same figures, so that scripts written for aiperf can read it.

aiperf takes percentiles of rates; this project takes them of seconds per token and inverts last.
So `output_token_throughput_per_user` at p50 is the interactivity here, but its avg is not.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable

from dflash_perf.harness.distribution import PERCENTILES
from dflash_perf.harness.points import SweepPoint

STATISTICS = ("avg", "min", "max", *(f"p{rank}" for rank in PERCENTILES), "std")
# (aiperf's tag, our tag, factor from our unit to aiperf's)
_DISTRIBUTIONS = (
    ("time_to_first_token", "ttft", 1e3),
    ("request_latency", "e2e", 1e3),
    ("inter_token_latency", "tpot", 1e3),
    ("output_sequence_length", "output_tokens", 1),
    ("input_sequence_length", "input_tokens", 1),
)
_NAMES = {
    "output_throughput": "output_token_throughput",
    "request_throughput": "request_throughput",
    "goodput": "goodput",
}


def points_csv(points: Iterable[SweepPoint]) -> str:
    """One row per point, means over its repeats; columns are aiperf's tags plus the statistic."""
    rows = [_point_row(point) for point in points]
    text = io.StringIO()
    names = dict.fromkeys(key for row in rows for key in row)
    table = csv.DictWriter(text, names, restval="", lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    return text.getvalue()


def _point_row(point: SweepPoint) -> dict[str, str]:
    row = {
        "configuration": point.configuration,
        "concurrency": "" if point.load.concurrency is None else str(point.load.concurrency),
        "request_rate": "" if point.load.request_rate is None else f"{point.load.request_rate:g}",
        "repeats": str(len(point.runs)),
        "request_count": str(point.requests - point.failed),
        "error_request_count": str(point.failed),
    }
    for name, tag, scale in _DISTRIBUTIONS:
        for statistic in STATISTICS:
            row[f"{name}_{statistic}"] = _figure(point.quantile(tag, statistic), scale)
    row["output_token_throughput_per_user_p50"] = _figure(point.interactivity)
    tags = sorted({tag for run in point.runs for tag in run.values} - {"interactivity"})
    for tag in [*_NAMES, *(tag for tag in tags if tag not in _NAMES)]:
        spread, name = point.value(tag), _NAMES.get(tag, tag)
        row[name] = _figure(spread.mean if spread else None)
        if spread is not None and spread.half_width is not None:
            row[f"{name}_confidence_95"] = _figure(spread.half_width)
    return row


def _figure(value: float | None, scale: float = 1) -> str:
    return "" if value is None else f"{value * scale:.6g}"

"""Fits the planner's parameters to published tables, judges it on others, stores both.

Prints what it finds; with --write it replaces dflash_trt/deploy/planning/calibration.yaml.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Annotated, Any

import click
import numpy as np
import yaml
from numpy.typing import NDArray

from dflash_perf.bench.base import Work, bench
from dflash_perf.extra import require
from dflash_trt.bundle.memory.gpu_layout import GpuLayout
from dflash_trt.core.formats import Format
from dflash_trt.core.yaml_files import read_yaml
from dflash_trt.deploy.planning.acceptance_rates import AcceptanceCurve
from dflash_trt.deploy.planning.calibration import CALIBRATION_FILE, Calibration, ProjectionAccuracy
from dflash_trt.deploy.planning.cost import Replica
from dflash_trt.deploy.planning.decoding import Autoregressive, Decoding, DraftTree, Eagle3
from dflash_trt.deploy.planning.known_pairs import (
    PairShape,
    decode_with,
    find_pair,
    published_decodings,
)
from dflash_trt.deploy.planning.layout_search import (
    Site,
    Workload,
    answer,
    best_at,
    possible_layouts,
)
from dflash_trt.hardware.gpus import find_gpu

Array = NDArray[np.float64]
PublishedRow = dict[str, Any]
"""A row of published.yaml; functions take all rows as `tables`, by kind."""

TABLES = Path(__file__).with_name("published.yaml")
FITTED = ("bandwidth_fraction", "flops_fraction", "layer_overhead_us", "step_overhead_us")
ASSUMED = {
    "collective_us": (
        8.0,
        "assumed: a small NVLink all-reduce; no published table has several GPUs",
    ),
    "link_fraction": (0.7, "assumed: what large collectives reach of NVLink"),
}
START = (0.6, 0.4, 25.0, 800.0)
COMMAND = "python -m dflash_perf bench planner-fit"
HEADER = f"# Written by `{COMMAND} --write` from published.yaml beside it.\n"


@dataclass(frozen=True, slots=True)
class Planner:
    """The planner with given parameters, at the tables' context and concurrencies."""

    tables: dict[str, Any]
    parameters: Calibration

    def rates(self, row: PublishedRow, decoding: Decoding) -> Array:
        """tokens/s at each concurrency, with the most drafts per step."""
        replica = Replica(find_gpu(row["gpu"]), GpuLayout(), self.parameters)
        drafts = max(decoding.drafts())
        context, batches = self.tables["context"], self.tables["concurrency"]
        seconds = [decoding.step(replica, batch, context, drafts).total for batch in batches]
        return np.asarray(decoding.tau(drafts) * np.array(batches) / seconds, dtype=float)

    def throughput_errors(self, row: PublishedRow) -> Array:
        """Relative errors of tokens/s, with drafts where the row has a τ."""
        decoding = _drafting(row) if "tau" in row else _plain(row)
        published: Array = np.array(row["values"], dtype=float)
        return self.rates(row, decoding) / published - 1

    def speedups(self, row: PublishedRow, decoding: Decoding) -> Array:
        """Speed-up over autoregressive decoding, or the row's `over`, at each concurrency."""
        other = _drafting({**row, **row["over"]}) if "over" in row else _plain(row)
        return self.rates(row, decoding) / self.rates(row, other)

    def ratio(self, row: PublishedRow) -> float | None:
        """Throughput ratio of two decodings at the τ that `plan` takes; None if unreachable."""
        pair, gpu = find_pair(row["pair"]), find_gpu(row["gpu"])
        layouts = possible_layouts(gpu, row["gpus"], [pair.target, pair.draft])
        workload = Workload(1024, 1024, 2048)
        site = Site(gpu, row["gpus"], layouts, self.parameters)
        ways: dict[str, Decoding] = {one.kind: one for one in published_decodings(pair)}
        ways["autoregressive"] = Autoregressive(pair.target)
        if "interactivity" in row:
            kinds = ("DFlash", row["over"])
            mine, other = (answer(site, ways[k], workload, row["interactivity"]) for k in kinds)
            return None if mine is None or other is None else mine.throughput / other.throughput

        def best(kind: str, batch: int) -> float:
            return best_at(site, GpuLayout(row["gpus"]), ways[kind], workload, batch).throughput

        return mean(best(row["of"], n) / best("autoregressive", n) for n in row["concurrency"])


def fit(tables: dict[str, Any]) -> tuple[Calibration, dict[str, float]]:
    """Least-squares fit of log errors on the fitted tables, and each parameter's standard error.

    Standard errors are relative and come from the Jacobian.
    """
    from scipy.optimize import least_squares

    rows = [row for row in tables["throughput"] if row["fitted"]]

    def errors(logs: Array) -> Array:
        planner = Planner(tables, _parameters(np.exp(logs)))
        found = [planner.throughput_errors(row) for row in rows]
        return np.asarray(np.log1p(np.concatenate(found)), dtype=float)

    upper = np.log([1.0, 1.0, 1e4, 1e5])
    found = least_squares(errors, np.log(START), bounds=(np.full(4, -14.0), upper))
    freedom = len(found.fun) - len(FITTED)
    covariance = np.linalg.inv(found.jac.T @ found.jac) * (2 * found.cost / freedom)
    spread = dict(zip(FITTED, np.sqrt(np.diag(covariance)).tolist(), strict=True))
    return _parameters(np.exp(found.x)), spread


def judge(tables: dict[str, Any], parameters: Calibration) -> list[ProjectionAccuracy]:
    """The planner's errors on every table, fitted or held out."""
    planner = Planner(tables, parameters)
    found = [
        _accuracy(row["table"], planner.throughput_errors(row), fitted=row["fitted"])
        for row in tables["throughput"]
    ]
    for row in tables["speedup"]:
        errors = planner.speedups(row, _drafting(row)) / row["values"] - 1
        found.append(_accuracy(row["table"], errors))
    for row in tables["eagle3"]:
        tree = DraftTree(*row["tree"])
        flat = AcceptanceCurve.of_tau(1.0, tree.depth, "τ 1")
        shape = planner.speedups(row, Eagle3(find_pair(row["pair"]).target, flat, tree))
        tau = float(np.exp(np.mean(np.log(row["values"] / shape))))
        note = f"τ is not published: {tau:.2f} fits best"
        found.append(_accuracy(row["table"], tau * shape / row["values"] - 1, note=note))
    for row in tables["blocks"]:
        curve = AcceptanceCurve.of_tau(row["tau"], row["drafts"], row["table"])
        error = curve.tau(row["shorter"]) / row["published"] - 1
        found.append(_accuracy(row["table"], np.array([error]), note="acceptance only"))
    for row in tables["ratios"]:
        note = f"another engine, EAGLE-3's τ assumed; {row['published']:g} published"
        ratio = planner.ratio(row)
        if ratio is None:
            note += ", not reachable here"
            found.append(ProjectionAccuracy(row["statement"], False, None, None, note))
            continue
        error = np.array([ratio / row["published"] - 1])
        found.append(_accuracy(row["statement"], error, note=f"{note}, {ratio:.2f} projected"))
    for row in tables["kinds"]:
        own = Planner({**tables, **row}, parameters)  # its context and concurrency
        errors = own.speedups(row, _drafting(row)) / row["values"] - 1
        found.append(_accuracy(row["table"], errors, note=row["note"]))
    alone = Planner({**tables, "concurrency": [1]}, parameters)
    for row in tables["single"]:
        speedups = [alone.speedups(row, _drafting({**row, "tau": tau})) for tau in row["taus"]]
        note = "another engine, its GPU not published (B200 assumed)"
        errors = np.concatenate(speedups) / row["values"] - 1
        found.append(_accuracy(row["table"], errors, note=note))
    return found


def _parameters(values: Array) -> Calibration:
    fitted = dict(zip(FITTED, values.tolist(), strict=True))
    return Calibration(**fitted, **{name: value for name, (value, _) in ASSUMED.items()})


def _pair(row: PublishedRow) -> PairShape:
    """The row's pair, its target in the row's format where that has one."""
    pair = find_pair(row["pair"])
    if "format" in row:
        pair = replace(pair, target=pair.target.in_format(Format(row["format"])))
    return pair


def _plain(row: PublishedRow) -> Decoding:
    return Autoregressive(_pair(row).target)


def _drafting(row: PublishedRow) -> Decoding:
    curve = AcceptanceCurve.of_tau(row["tau"], row["drafts"], row["table"])
    return decode_with(_pair(row), row.get("kind", "DFlash"), curve)


def _accuracy(
    table: str, errors: Array, *, fitted: bool = False, note: str = ""
) -> ProjectionAccuracy:
    worst = float(errors[np.argmax(np.abs(errors))])
    return ProjectionAccuracy(
        table, fitted, round(median(np.abs(errors).tolist()), 4), round(worst, 4), note
    )


def origins(tables: dict[str, Any], spread: dict[str, float]) -> dict[str, str]:
    """How each parameter was found, and its value if sequences held half as many tokens."""
    context = tables["context"] // 2
    other, _ = fit({**tables, "context": context})
    return {name: text for name, (_, text) in ASSUMED.items()} | {
        name: f"fitted, standard error {error:.0%}; {getattr(other, name):.3g} had sequences held "
        f"{context:,} tokens"
        for name, error in spread.items()
    }


def to_yaml(
    parameters: Calibration, origin: dict[str, str], found: list[ProjectionAccuracy]
) -> str:
    """The content of calibration.yaml."""
    return HEADER + yaml.safe_dump(
        {
            "fitted_by": COMMAND,
            "parameters": {
                name: {"value": float(f"{value:.4g}"), "origin": origin[name]}
                for name, value in asdict(parameters).items()
            },
            "accuracy": [asdict(one) for one in found],
        },
        sort_keys=False,
        allow_unicode=True,
        width=100,
    )


@bench()
def measure(work: Work, *, write: Annotated[bool, "Replace the planner's calibration."]) -> None:
    require("fitting the planner", "scipy")
    tables = read_yaml(TABLES)
    parameters, spread = fit(tables)
    text = to_yaml(parameters, origins(tables, spread), judge(tables, parameters))
    click.echo(text)
    if write:
        CALIBRATION_FILE.write_text(text, encoding="utf-8")

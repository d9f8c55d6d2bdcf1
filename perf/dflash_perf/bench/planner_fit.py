"""Fits the planner's parameters to published tables, judges it on others, stores both.

Prints what it finds; with --write it replaces dflash_trt/planning/calibration.yaml.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import click
import numpy as np
import yaml
from numpy.typing import NDArray

from dflash_perf.bench.base import Work, bench
from dflash_perf.extra import require
from dflash_trt.core.yaml_files import read_yaml
from dflash_trt.hardware.gpus import find_gpu
from dflash_trt.memory.gpus import GpuLayout
from dflash_trt.planning.acceptance import AcceptanceCurve
from dflash_trt.planning.calibration import CALIBRATION_FILE, Calibration, ProjectionAccuracy
from dflash_trt.planning.cost import Replica
from dflash_trt.planning.decoding import Autoregressive, Decoding, DFlash, DraftTree, Eagle3
from dflash_trt.planning.known_pairs import find_pair
from dflash_trt.planning.published import published_decodings
from dflash_trt.planning.search import Site, Workload, answer, best_at, possible_layouts

Array = NDArray[np.float64]

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


def fit(tables: dict[str, Any]) -> tuple[Calibration, dict[str, float]]:
    """Parameters with the least squared log errors on the fitted tables, and their standard errors.

    The standard errors are relative, from the Jacobian: what so few points can tell apart.
    """
    from scipy.optimize import least_squares

    rows = [row for row in tables["throughput"] if row["fitted"]]

    def errors(logs: Array) -> Array:
        parameters = _parameters(np.exp(logs))
        found = [_throughput_errors(tables, row, parameters) for row in rows]
        return np.asarray(np.log1p(np.concatenate(found)), dtype=float)

    upper = np.log([1.0, 1.0, 1e4, 1e5])
    found = least_squares(errors, np.log(START), bounds=(np.full(4, -14.0), upper))
    freedom = len(found.fun) - len(FITTED)
    covariance = np.linalg.inv(found.jac.T @ found.jac) * (2 * found.cost / freedom)
    spread = dict(zip(FITTED, np.sqrt(np.diag(covariance)).tolist(), strict=True))
    return _parameters(np.exp(found.x)), spread


def judge(tables: dict[str, Any], parameters: Calibration) -> list[ProjectionAccuracy]:
    """The errors on every table, fitted or not."""
    found = [
        _accuracy(row["table"], _throughput_errors(tables, row, parameters), fitted=row["fitted"])
        for row in tables["throughput"]
    ]
    for row in tables["speedup"]:
        errors = _speedups(tables, row, _dflash(row), parameters) / row["values"] - 1
        found.append(_accuracy(row["table"], errors))
    for row in tables["eagle3"]:
        tree = DraftTree(*row["tree"])
        flat = AcceptanceCurve.of_tau(1.0, tree.depth, "τ 1")
        shape = _speedups(
            tables, row, Eagle3(find_pair(row["pair"]).target, flat, tree), parameters
        )
        tau = float(np.exp(np.mean(np.log(row["values"] / shape))))
        note = f"τ is not published: {tau:.2f} fits best"
        found.append(_accuracy(row["table"], tau * shape / row["values"] - 1, note=note))
    for row in tables["blocks"]:
        curve = AcceptanceCurve.of_tau(row["tau"], row["drafts"], row["table"])
        error = curve.tau(row["shorter"]) / row["published"] - 1
        found.append(_accuracy(row["table"], np.array([error]), note="acceptance only"))
    found += [_ratio(row, parameters) for row in tables["ratios"]]
    for row in tables["single"]:
        errors = [
            _speedups(
                {**tables, "concurrency": [1]}, row, _dflash({**row, "tau": tau}), parameters
            )[0]
            / published
            - 1
            for tau, published in zip(row["taus"], row["values"], strict=True)
        ]
        note = "another engine, its GPU not published (B200 assumed)"
        found.append(_accuracy(row["table"], np.array(errors), note=note))
    return found


def _parameters(values: Array) -> Calibration:
    fitted = dict(zip(FITTED, values.tolist(), strict=True))
    return Calibration(**fitted, **{name: value for name, (value, _) in ASSUMED.items()})


def _dflash(row: dict[str, Any]) -> DFlash:
    pair = find_pair(row["pair"])
    curve = AcceptanceCurve.of_tau(row["tau"], row["drafts"], row["table"])
    return DFlash(pair.target, pair.draft, curve)


def _rates(
    tables: dict[str, Any], row: dict[str, Any], decoding: Decoding, parameters: Calibration
) -> Array:
    """tokens/s at each concurrency, all drafts used."""
    replica = Replica(find_gpu(row["gpu"]), GpuLayout(), parameters)
    drafts = max(decoding.drafts())
    return np.array(
        [
            batch
            * decoding.tau(drafts)
            / decoding.step(replica, batch, tables["context"], drafts).total
            for batch in tables["concurrency"]
        ]
    )


def _throughput_errors(
    tables: dict[str, Any], row: dict[str, Any], parameters: Calibration
) -> Array:
    plain = Autoregressive(find_pair(row["pair"]).target)
    decoding: Decoding = _dflash(row) if "tau" in row else plain
    published = np.array(row["values"], dtype=float)
    return np.asarray(_rates(tables, row, decoding, parameters) / published - 1, dtype=float)


def _speedups(
    tables: dict[str, Any], row: dict[str, Any], decoding: Decoding, parameters: Calibration
) -> Array:
    plain = Autoregressive(find_pair(row["pair"]).target)
    return _rates(tables, row, decoding, parameters) / _rates(tables, row, plain, parameters)


def _ratio(row: dict[str, Any], parameters: Calibration) -> ProjectionAccuracy:
    """A published ratio of two decodings, with the τ that `plan` assumes."""
    pair, gpu = find_pair(row["pair"]), find_gpu(row["gpu"])
    layouts = possible_layouts(gpu, row["gpus"], [pair.target, pair.draft.model])
    site, workload = Site(gpu, row["gpus"], layouts, parameters), Workload(1024, 1024, 2048)
    ways: dict[str, Decoding] = {one.kind: one for one in published_decodings(pair)}
    ways["autoregressive"] = Autoregressive(pair.target)
    note = f"another engine, τ assumed; {row['published']:g} published"
    if "interactivity" in row:
        mine, other = (
            answer(site, ways[kind], workload, row["interactivity"])
            for kind in ("DFlash", row["over"])
        )
        if mine is None or other is None:
            return ProjectionAccuracy(
                row["statement"], False, None, None, f"{note}, not reachable here"
            )
        projected = mine.throughput / other.throughput
    else:
        whole = GpuLayout(row["gpus"])
        speedups = [
            best_at(site, whole, ways[row["of"]], workload, batch).throughput
            / best_at(site, whole, ways["autoregressive"], workload, batch).throughput
            for batch in row["concurrency"]
        ]
        projected = sum(speedups) / len(speedups)
    error = np.array([projected / row["published"] - 1])
    return _accuracy(row["statement"], error, note=f"{note}, {projected:.2f} projected")


def _accuracy(
    table: str, errors: Array, *, fitted: bool = False, note: str = ""
) -> ProjectionAccuracy:
    worst = float(errors[np.argmax(np.abs(errors))])
    return ProjectionAccuracy(
        table, fitted, round(median(np.abs(errors).tolist()), 4), round(worst, 4), note
    )


def origins(tables: dict[str, Any], spread: dict[str, float]) -> dict[str, str]:
    """How each parameter was found, and what it would be had sequences held half the tokens."""
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

"""The planner's calibration: reproduced by its command, and as accurate as it says."""

from __future__ import annotations

import pytest

pytest.importorskip("scipy", reason="the perf extra is not installed")

from dflash_perf.bench.planner_fit import FITTED, TABLES, fit, judge

from dflash_trt.core.yaml_files import read_yaml
from dflash_trt.deploy.planning.calibration import read_calibration


def test_the_stored_calibration_is_what_the_command_finds() -> None:
    stored, tables = read_calibration(), read_yaml(TABLES)
    found, spread = fit(tables)
    for name in FITTED:
        assert getattr(found, name) == pytest.approx(getattr(stored.parameters, name), rel=0.02)
        assert spread[name] < 0.25
    for mine, theirs in zip(judge(tables, found), stored.accuracy, strict=True):
        assert mine.table == theirs.table and mine.fitted == theirs.fitted
        assert mine.median == pytest.approx(theirs.median, abs=0.01)
        assert mine.worst == pytest.approx(theirs.worst, abs=0.02)


def test_how_accurate_it_is() -> None:
    """Bounds that a change of the model must not leave unnoticed."""
    found = {one.table: one for one in read_calibration().accuracy}
    bounds = {
        "Qwen3-4B MATH-500, autoregressive": (0.03, 0.05),
        "Qwen3-4B MATH-500, DFlash 16": (0.03, 0.06),
        "Qwen3-4B HumanEval, DFlash 16": (0.07, 0.08),
        "Llama-3.1-8B GSM8K, DFlash 10": (0.15, 0.20),
        "Llama-3.1-8B HumanEval, DFlash 10": (0.15, 0.20),
        "Llama-3.1-8B Alpaca, DFlash 10": (0.15, 0.20),
    }
    for table, (median, worst) in bounds.items():
        one = found[table]
        assert one.median is not None and one.median <= median
        assert one.worst is not None and abs(one.worst) <= worst
    assert [one.table for one in found.values() if one.fitted] == list(bounds)[:2]

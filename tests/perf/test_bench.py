"""The registry of benchmarks: its list, its help, its records, its errors."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest
from dflash_perf.__main__ import main
from dflash_perf.bench.base import Bench
from dflash_perf.bench.registry import BENCHES
from dflash_perf.bench.repeat import show, spread, spread_of_ratios, take_turns

MACHINE = {"processor", "cores", "memory_gib", "system", "python", "libraries"}
SPREAD = {"median", "min", "max", "runs"}


def test_the_list_says_what_each_is_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == sorted(BENCHES)
    for bench, line in zip(BENCHES.values(), lines, strict=True):
        assert line.endswith(f"  {bench.description}")
        assert bench.description.endswith((".", "?")) and len(bench.description) > 20


@pytest.mark.parametrize("bench", BENCHES.values(), ids=list(BENCHES))
def test_help(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", bench.name, "--help"]) == 0
    shown = capsys.readouterr().out
    assert "--runs" in shown and "--scratch" in shown
    assert ("--output " in shown) == bench.is_recorded
    for option in bench.options:
        assert all(name in shown for name in option.opts if name.startswith("-"))


def test_a_record_has_what_its_figures_depend_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "records"
    arguments = ["bench", "step-cost", "--runs", "2", "--seconds", "0.01"]
    assert main([*arguments, "--scratch", str(tmp_path), "--output", str(output)]) == 0
    (path,) = output.iterdir()
    assert capsys.readouterr().out.splitlines()[-1] == str(path)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["records"]
    record = json.loads(path.read_text())
    assert list(record)[:5] == ["name", "date", "command", "machine", "load_average_at_end"]
    assert record["options"] == {"runs": 2, "seconds": 0.01}
    assert record["name"] == "step-cost"
    day = datetime.fromisoformat(record["date"])
    assert abs((datetime.now(UTC) - day).total_seconds()) < 3600
    assert path.name == f"{day:%Y-%m-%d}-step-cost.json"
    plain = f"--scratch {tmp_path.name} --output records"
    assert record["command"] == f"python -m dflash_perf {' '.join(arguments)} {plain}"
    assert set(record["machine"]) == MACHINE
    assert {"dflash-trt", "numpy", "onnxruntime"} <= set(record["machine"]["libraries"])
    assert record["tokens_held"] == 100
    assert set(record["by_graph"]) == {"target_only", "dflash"}
    for figures in record["by_graph"].values():
        for found in (figures["ratio_4096_to_512"], *figures["ms_per_step"].values()):
            assert set(found) == SPREAD and found["runs"] == 2 and found["min"] > 0


def test_an_option_may_name_the_record() -> None:
    build_cost = BENCHES["build-cost"]
    assert build_cost.record_name({"executor": "cpu"}) == "build-cost"
    assert build_cost.record_name({"executor": "tensorrt-rtx"}) == "build-cost-tensorrt-rtx"


@pytest.mark.parametrize(
    ("arguments", "code", "start", "end"),
    [
        ("step-kost", 2, "no benchmark is called 'step-kost' (nearest: 'step-cost')", ""),
        ("step-cost --runs 0", 2, "Invalid value for '--runs'", ""),
        ("demo-speed", 2, "Missing argument 'BUNDLE'", ""),
        ("step-cost --second 1", 2, "No such option", ""),
        ("demo-speed NONE", 2, "NONE: ", ""),
        ("step-cost --scratch NONE", 1, "NONE/", ": No such file or directory"),
    ],
)
def test_what_fails_is_one_line(
    arguments: str,
    code: int,
    start: str,
    end: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    none = str(tmp_path / "none")
    assert main(["bench", *arguments.replace("NONE", none).split()]) == code
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.startswith(f"error: {start.replace('NONE', none)}")
    assert captured.err.endswith(f"{end}\n")


def test_without_a_name_the_list_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench"]) == 2
    assert "served-demo" in capsys.readouterr().err


def test_ways_take_turns() -> None:
    order: list[str] = []
    ways = {name: lambda name=name: order.append(name) or len(order) for name in "abc"}  # type: ignore[misc,func-returns-value]
    assert take_turns(ways, 2) == {"a": [1, 4], "b": [2, 5], "c": [3, 6]}
    order.clear()
    take_turns(ways, 3, rotate=True)
    assert "".join(order) == "abccabbca"


def test_spreads() -> None:
    figures = spread([3.0, 1.0, 2.0])
    assert figures == {"median": 2.0, "min": 1.0, "max": 3.0, "runs": 3}
    assert show(figures, ".1f") == "2.0 (1.0 … 3.0)"
    assert spread_of_ratios([2.0, 9.0], [1.0, 3.0]) == spread([2.0, 3.0])

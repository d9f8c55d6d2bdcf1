"""Benchmarks: their list, help, records and errors; the planner's fit."""

from __future__ import annotations

import json
import sys
from datetime import datetime
from pathlib import Path

import pytest
from dflash_perf.__main__ import benches, main
from dflash_perf.bench.peers import Round, read_peers, summarize
from dflash_perf.bench.planner_fit import FITTED, TABLES, fit, judge
from dflash_perf.bench.repeat import Worker, interval, show, spread, spread_of_ratios, take_turns
from dflash_perf.bench.served_demo import served_ways

import dflash_trt
from dflash_trt.core.yaml_files import read_yaml
from dflash_trt.deploy.planning.calibration import read_calibration
from dflash_trt.errors import DflashError

ROOT = Path(__file__).parents[2]
BENCHES = benches()
MACHINE = {"processor", "cores", "memory_gib", "system", "python", "libraries"}
SPREAD = {"median", "min", "max", "runs"}


@pytest.mark.parametrize("name", BENCHES)
def test_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", name, "--help"]) == 0
    shown = capsys.readouterr().out
    assert "--runs" in shown and "--scratch" in shown
    assert ("--output " in shown) == (name not in ("planner-fit", "served-demo"))
    for option in BENCHES[name].params:
        assert all(word in shown for word in option.opts if word.startswith("-"))


def test_a_record_has_what_its_figures_depend_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the speed of a pair named twice."""
    bundle, output = dflash_trt.build("demo", tmp_path / "demo").folder, tmp_path / "records"
    arguments = ["bench", "speed", f"a={bundle}", f"b={bundle}", "--runs", "2"]
    arguments += ["--concurrency", "2", "--block", "4", "--max-tokens", "24"]
    assert main([*arguments, "--output", str(output)]) == 0
    (path,) = output.iterdir()
    assert capsys.readouterr().out.splitlines()[-1] == str(path)
    record = json.loads(path.read_text())
    assert list(record)[:5] == ["name", "date", "command", "machine", "load_average_at_end"]
    options = {"runs": 2, "bundle": ["a=demo", "b=demo"], "concurrency": [2], "max_tokens": 24}
    assert record["options"].items() >= options.items()
    day = datetime.fromisoformat(record["date"])
    assert path.name == f"{day:%Y-%m-%d}-speed.json"
    assert record["command"].startswith("python -m dflash_perf bench speed a=demo b=demo --runs")
    assert str(tmp_path) not in path.read_text()  # records name no local folders
    assert set(record["machine"]) == MACHINE
    assert {"dflash-trt", "numpy", "onnxruntime"} <= set(record["machine"]["libraries"])
    (figures,) = record["by_concurrency"].values()
    assert set(figures) == {f"{name}, {way}" for name in "ab" for way in ("target_only", "block 4")}
    lengths = {name: one["acceptance_length"]["median"] for name, one in figures.items()}
    assert lengths["a, target_only"] == lengths["b, target_only"] == 1
    assert 1 < lengths["a, block 4"] == lengths["b, block 4"] <= 4
    for one in figures.values():
        assert all(set(spread) == SPREAD and spread["min"] > 0 for spread in one.values())


@pytest.mark.parametrize(
    ("arguments", "code", "start", "end"),
    [
        ("sped", 2, "no benchmark is called 'sped' (nearest: 'speed')", ""),
        ("speed --runs 0", 2, "Invalid value for '--runs'", ""),
        ("speed", 2, "Missing argument 'BUNDLE...'", ""),
        ("speed x=y --second 1", 2, "No such option", ""),
        ("speed NONE", 2, "'NONE' is not one NAME=BUNDLE", ""),
        ("speed a=NONE", 2, "NONE: ", ""),
        ("peers a=NONE", 2, "NONE: ", ""),
        ("speed a=b --scratch NONE", 1, "NONE/", ": No such file or directory"),
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
    shown = " ".join(capsys.readouterr().err.split())
    for name, one in BENCHES.items():
        description = (one.help or "").partition("\n")[0]
        assert f"{name} {description}" in shown
        assert description.endswith((".", "?")) and len(description) > 20


def test_ways_take_turns() -> None:
    order: list[str] = []
    ways = {name: lambda name=name: order.append(name) or len(order) for name in "abc"}  # type: ignore[misc,func-returns-value]
    assert take_turns(ways, 2, warm_up=True) == {"a": [5, 9], "b": [6, 7], "c": [4, 8]}
    assert "".join(order) == "abccabbca"


PEER = """#!{python}
import json, os, sys, time
*_, kind, model, threads = sys.argv
if kind == "transformers":
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
if kind == "openvino":
    print("no such device", file=sys.stderr)
    sys.exit(3)
print(json.dumps({{"model": "a stub with " + threads}}), flush=True)
for line in sys.stdin:
    prompts, count = json.loads(line)
    one = [[7] * count, 1, count - 1, 0.1, (count - 1) / 50]
    print(json.dumps([one] * len(prompts)), flush=True)
"""


def test_peers_are_asked_in_turn_and_skipped_with_their_reasons(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that is a stub of 50 tokens/s, one that fails, and transformers itself."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    python, model = tmp_path / "python", tmp_path / "m.Q8_0.gguf"
    python.write_text(PEER.format(python=sys.executable))
    python.chmod(0o755)
    model.touch()
    bundle, target = dflash_trt.build("demo", tmp_path / "demo"), ROOT / "demo_pair" / "target"
    command = ["bench", "peers", f"demo={bundle.folder}", "--peer-python", str(python)]
    for peer in (f"llama.cpp={model}", f"openvino={tmp_path}", f"transformers={target}"):
        command += ["--peer", peer]
    command += ["--runs", "2", "--each", "2", "--max-tokens", "9", "--threads", "1"]
    assert main([*command, "--output", str(tmp_path / "records")]) == 0
    shown = capsys.readouterr().out
    reason = "python: its process ended with exit code 3 no such device"
    assert f"openvino {tmp_path.name}: skipped, {reason}" in shown
    (path,) = (tmp_path / "records").iterdir()
    record = json.loads(path.read_text())
    assert str(tmp_path) not in path.read_text()
    assert record["skipped"] == {f"openvino {tmp_path.name}": reason}
    figures = record["by_threads"]["1"]
    ways = figures["ways"]
    peers = ["llama.cpp m.Q8_0", "transformers target"]
    assert list(ways) == ["demo, plain", "demo, drafts", *peers]
    stub = ways["llama.cpp m.Q8_0"]
    assert stub["model"] == "a stub with 1" and stub["decode"]["median"] == pytest.approx(50)
    assert ways["transformers target"]["model"].startswith("torch.bfloat16, transformers ")
    for name in ("demo, plain", "llama.cpp m.Q8_0", "transformers target"):
        assert ways[name]["tokens_per_step"] == 1
    plain = ways["demo, plain"]["decode_by_round"]
    ratio = figures["ratios"]["demo, plain"]["llama.cpp m.Q8_0"]
    assert ratio["median"] == pytest.approx(sum(plain) / 2 / 50, rel=1e-3)
    assert list(figures["ratios"]["demo, drafts"]) == ["demo, plain", *peers]


@pytest.mark.parametrize("peer", ["gguf={}", "llama.cpp={}/none", "llama.cpp", "plain={}"])
def test_a_peer_that_is_none_is_refused(peer: str, tmp_path: Path) -> None:
    with pytest.raises(DflashError, match=r"--peer: .* of llama\.cpp, openvino, transformers"):
        read_peers([peer.format(tmp_path)])


def test_a_worker_says_why_it_does_not_answer(tmp_path: Path) -> None:
    python = [sys.executable, "-c"]
    said, silent = Worker([*python, "print('hello')"]), tmp_path / "log"
    with pytest.raises(DflashError, match=f"^{Path(sys.executable).name}: says 'hello"):
        said.ask()
    with pytest.raises(DflashError, match=r"ended with exit code 0$"):
        said.ask({})
    ended = Worker([*python, "import sys; sys.exit('no model here')"], silent)
    with pytest.raises(DflashError, match=r"ended with exit code 1 no model here$"):
        ended.ask()
    said.close()
    ended.close()


def test_drafts_that_change_a_token_are_no_result() -> None:
    def each(token: int) -> list[Round]:
        return [Round([[1, token]], 2.0, 2.0, 1.0)]

    told = {"a, plain": "", "a, drafts": ""}
    assert summarize({"a, plain": each(2), "a, drafts": each(2)}, told)["ways"]
    with pytest.raises(AssertionError, match="a, drafts: other tokens"):
        summarize({"a, plain": each(2), "a, drafts": each(3)}, told)


def test_each_way_is_served_by_its_own_name(tmp_path: Path) -> None:
    bundle = dflash_trt.build("demo-dflash2", tmp_path / "demo")
    served = served_ways(bundle, {"DFlash": bundle})
    assert list(served) == ["target_only", "prompt lookup", "DFlash 2", "DFlash"]
    assert [one.drafter for _, one in served.values()] == ["none", "prompt-lookup", *["dflash"] * 2]
    with pytest.raises(DflashError, match="'DFlash 2' is what"):
        served_ways(bundle, {"DFlash 2": bundle})


def test_spreads() -> None:
    figures = spread([3.0, 1.0, 2.0])
    assert figures == {"median": 2.0, "min": 1.0, "max": 3.0, "runs": 3}
    assert show(figures, ".1f") == "2.0 (1.0 … 3.0)"
    assert spread_of_ratios([2.0, 9.0], [1.0, 3.0]) == spread([2.0, 3.0])
    assert interval([1.0] * 15) == (1.0, 1.0)
    low, high = interval([0.9, 1.0, 1.1] * 5)
    assert 0.9 <= low < 1.0 < high <= 1.1


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
        "Qwen3-4B at 32 users, DFlash 2 of 7 drafts": (0.20, 0.20),
        "Qwen3-4B at equal τ, DFlash 2 ÷ DFlash": (0.005, 0.005),
        "Qwen3.6-35B-A3B alone, DFlash of 7 drafts ÷ MTP of 3": (0.30, 0.30),
    }
    for table, (median, worst) in bounds.items():
        one = found[table]
        assert one.median is not None and one.median <= median
        assert one.worst is not None and abs(one.worst) <= worst
    assert [one.table for one in found.values() if one.fitted] == list(bounds)[:2]

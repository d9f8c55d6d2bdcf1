"""`plan`: its answers as users see them; its figures and refusals are in tests/frozen."""

from __future__ import annotations

import json
import re
from itertools import combinations
from pathlib import Path

import pytest

from dflash_trt.bundle.memory.gpu_layout import GpuLayout
from dflash_trt.deploy.planning.calibration import read_calibration
from dflash_trt.deploy.planning.known_pairs import find_pair, published_decodings
from dflash_trt.deploy.planning.layout_search import Site, Workload
from dflash_trt.deploy.planning.projection import make_projection
from dflash_trt.hardware.gpus import find_gpu
from dflash_trt.models.build_config import data_folder
from tests.cli.conftest import Run

GOLDEN = Path(__file__).with_name("plan_golden.txt")
ASKED = ("plan", "--target", "gpt-oss-120b", "--gpu", "b300", "--interactivity")
QWEN = ("plan", "--target", "qwen3-8b", "--gpu", "b200", "--interactivity", "300")


def test_the_whole_answer(run: Run) -> None:
    """Golden: `dflash-trt plan … --interactivity 500 --gpus 8` writes it again."""
    shown = run(*ASKED, "500", "--gpus", "8")
    assert shown.code == 0 and shown.err == ""
    assert shown.out == GOLDEN.read_text(encoding="utf-8")


def test_a_pair_of_ones_own(run: Run, tmp_path: Path) -> None:
    demo = data_folder("demo_pair")
    own = ("plan", "--target", demo)
    short = ("--gpu", "rtx-5090", "--interactivity", "500")
    short += ("--input-tokens", "100", "--output-tokens", "100")
    curve = tmp_path / "acceptance.json"
    curve.write_text(json.dumps({"conditional": [0.9] * 7}))
    plan = run(*own, *short, "--acceptance", curve, "--json").json
    assert plan["acceptance"] == {"DFlash": "measured: acceptance.json"}
    assert set(plan["answers"]) == {"autoregressive", "DFlash"}
    dspark = run(
        "plan", "--target", "demo-dspark", *short, "--acceptance", curve, "-o", tmp_path / "p.png"
    )
    assert dspark.code == 0 and "memory of one GPU with DSpark" in dspark.out
    assert "how DSpark's answer depends on parameters" in dspark.out


def test_a_page_and_a_picture(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the perf extra is not installed")
    from tests.perf.page import Page

    page = tmp_path / "new" / "plan.html"
    run.well(*QWEN, "-o", page)
    text = page.read_text(encoding="utf-8")
    parsed = Page(text)
    assert not any("//" in value or "url(h" in value for value in parsed.loads)
    assert "http" not in text.replace("http-equiv", "")
    assert parsed.figures["projection"] > 10 and not parsed.open
    assert "PROJECTION, not measured: qwen3-8b on 1 × B200" in parsed.text
    assert "Dashed lines are projections" in parsed.text and "held out" in parsed.text
    answer = text.index('"headline">At ')
    assert answer < text.index("<table") < text.index("<svg") < text.index("<h2>assumptions")
    picture = tmp_path / "plan.png"
    run.well(*QWEN, "-o", picture)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_measured_results_are_drawn_solid(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the perf extra is not installed")
    from tests.perf.invented import invented_config, write_invented

    results = tmp_path / "results"
    write_invented(results, invented_config(gpus=1, concurrency=[1, 4, 16], repeats=1))
    page = tmp_path / "plan.html"
    run.well(*QWEN, "-o", page, "--measured", results)
    text = page.read_text(encoding="utf-8")
    assert "Solid lines are measured" in text and "only solid lines of the chart" in text
    per_server = tmp_path / "per server"
    write_invented(per_server, invented_config(concurrency=[1, 4], repeats=1))
    other = tmp_path / "other.html"
    run(*QWEN, "-o", other, "--measured", per_server).fails(2, str(per_server), "`gpus`")
    assert not other.exists()


def test_no_label_covers_another() -> None:
    """That of what is projected least of all."""
    pytest.importorskip("matplotlib", reason="the perf extra is not installed")
    from dflash_perf.projection.projection_page import draw_plan
    from dflash_perf.report.style import chart_style

    for gpu in ("b300", "rtx-pro-6000"):
        layouts = (GpuLayout(),)
        site = Site(find_gpu(gpu), 1, layouts, read_calibration().parameters)
        pair = find_pair("qwen3-8b")
        plan = make_projection(
            pair, site, Workload(1024, 1024, 2048), 100.0, published_decodings(pair)
        )
        with chart_style():
            figure = draw_plan(plan).figure
            figure.canvas.draw()
            (axes,) = figure.axes
            boxes = {text.get_text(): text.get_window_extent() for text in axes.texts}
            legend = axes.get_legend()
            assert legend is not None and "PROJECTION" in legend.get_title().get_text()
            boxes["legend"] = legend.get_window_extent()
        drawn = [line.get_xydata().tolist() for line in axes.lines if len(line.get_xdata()) > 2]
        for answer in filter(None, map(plan.answer, plan.points)):
            ring = [plan.interactivity, answer.throughput]
            assert any(ring in line for line in drawn), "a ring lies on its line"
        for one, other in combinations(boxes, 2):
            assert not boxes[one].overlaps(boxes[other]), (one, other)


def test_without_an_interactivity_the_whole_fronts(run: Run, tmp_path: Path) -> None:
    asked = ("plan", "--target", "qwen3-8b", "--gpu", "h100")
    shown = run.well(*asked, "--precision", "nvfp4")
    assert "DFlash's configuration" in shown.out and "depends on parameters" not in shown.out
    assert "note: H100 SXM does not multiply nvfp4" in shown.out
    plan = run.well(*asked, "--json").json
    assert plan["interactivity"] is plan["answers"] is None and plan["notes"] == []
    assert len(plan["fronts"]["DFlash"]) > 5
    pytest.importorskip("matplotlib", reason="the perf extra is not installed")
    page = tmp_path / "plan.html"
    run.well(*asked, "-o", page)
    text = page.read_text(encoding="utf-8")
    assert "Rings mark" not in text
    assert re.search(
        r'"headline">For one user, DFlash gives the most: [\d,]+ tokens/s per user', text
    )
    assert "For many, " in text


def test_acceptance_is_what_other_commands_write(run: Run, bundle: Path, tmp_path: Path) -> None:
    """`generate --json` for real; the keys of the others are tested where they are written."""

    def acceptance(given: Path) -> str:
        plan = run.well(*QWEN, "--acceptance", given, "--json").json
        return f"{plan['acceptance']['DFlash']}: {plan['most_interactive']['DFlash']['tau']:.3f}"

    asked = ("generate", bundle, "--prompt", "b", "--max-tokens", 20, "--json")
    measured = tmp_path / "generated.json"
    always = (*asked, "--block-schedule", "none")  # or a busy machine may decide for no drafts
    measured.write_text(run.well(*always).out)
    assert acceptance(measured) == "measured: generated.json: 2.000"
    measured.write_text(run.well(*always, "--prompt", "b").out)
    assert acceptance(measured) == "measured: generated.json: 2.000"
    for name, text in (
        ("diagnosis/diagnosis.json", {"acceptance": {"conditional_acceptance": [1.0, 0.0]}}),
        ("sweep/a/run-1/summary.json", {"acceptance": None}),
        ("sweep/b/run-1/summary.json", {"acceptance": {"conditional": [1.0, 0.0, None]}}),
    ):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(json.dumps(text))
    assert acceptance(tmp_path / "diagnosis") == "measured: diagnosis.json: 2.000"
    assert acceptance(tmp_path / "sweep") == "measured: summary.json: 2.000"
    (tmp_path / "empty").mkdir()
    run(*QWEN, "--acceptance", tmp_path / "empty").fails(2, "holds no diagnosis.json")
    measured.write_text(run.well(*asked, "--no-speculation").out)
    run(*QWEN, "--acceptance", measured).fails(2, "`conditional_acceptance`")


def test_a_workload_has_its_own_acceptance(run: Run) -> None:
    """Three drafters of one training; one whose τ is not published there is not projected."""
    plan = run.well(*QWEN, "--acceptance", "humaneval, T=1", "--json").json
    known = {kind: one["tau"] for kind, one in plan["most_interactive"].items()}
    known.pop("autoregressive")
    assert known == pytest.approx({"EAGLE-3": 4.33, "DFlash": 4.64, "DSpark": 5.52})
    steps = {kind: one["step_seconds"] for kind, one in plan["most_interactive"].items()}
    markov = sum(steps["DSpark"].values()) / sum(steps["DFlash"].values())
    assert 1 < markov < 1.05
    plan = run.well(*ASKED, "500", "--gpus", "8", "--acceptance", "math500", "--json").json
    assert set(plan["answers"]) == {"autoregressive", "DFlash"}
    run(*QWEN, "--acceptance", "chat").fails(2, "'chat' is neither", "workload: average, GSM8K")


def test_narrow_caches_hold_more_users(run: Run) -> None:
    wide, narrow = (run.well(*QWEN, "--kv-dtype", name, "--json").json for name in ("auto", "fp8"))
    for one, other in zip(wide["memory"], narrow["memory"], strict=True):
        assert other["target_kv"] == one["target_kv"] / 2 and other["users"] > one["users"]
    assert (
        narrow["answers"]["DFlash"]["throughput_per_gpu"]
        > wide["answers"]["DFlash"]["throughput_per_gpu"]
    )

"""`plan`: its answers as users see them; its figures and refusals are in tests/frozen."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path

import pytest

from dflash_trt.config import data_folder
from dflash_trt.hardware.gpus import find_gpu
from dflash_trt.memory.gpus import GpuLayout
from dflash_trt.planning.calibration import read_calibration
from dflash_trt.planning.known_pairs import find_pair, published_decodings
from dflash_trt.planning.projection import make_projection
from dflash_trt.planning.search import Site, Workload
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
    own = ("plan", "--target-checkpoint", demo / "target", "--draft-checkpoint", demo / "draft")
    short = ("--gpu", "rtx-5090", "--interactivity", "500")
    short += ("--input-tokens", "100", "--output-tokens", "100")
    curve = tmp_path / "acceptance.json"
    curve.write_text(json.dumps({"conditional": [0.9] * 7}))
    plan = run(*own, *short, "--acceptance", curve, "--json").json
    assert plan["acceptance"] == {"DFlash": "measured: acceptance.json"}
    assert set(plan["answers"]) == {"autoregressive", "DFlash"}


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
    assert "Solid lines are measured" in text and "only the chart's solid lines" in text
    per_server = tmp_path / "per server"
    write_invented(per_server, invented_config(concurrency=[1, 4], repeats=1))
    other = tmp_path / "other.html"
    run(*QWEN, "-o", other, "--measured", per_server).fails(2, str(per_server), "--gpus")
    assert not other.exists()


def test_no_label_covers_another() -> None:
    """That of what is projected least of all."""
    pytest.importorskip("matplotlib", reason="the perf extra is not installed")
    from dflash_perf.projection.chart import draw_plan
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
            boxes = {text.get_text(): text.get_window_extent() for text in figure.axes[0].texts}
        assert any("PROJECTION" in words for words in boxes)
        for one, other in combinations(boxes, 2):
            assert not boxes[one].overlaps(boxes[other]), (one, other)

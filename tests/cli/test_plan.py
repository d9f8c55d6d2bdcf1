"""`plan`: its answers as users see them; its figures and refusals are in tests/frozen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dflash_trt.models.build_config import data_folder
from tests.cli.conftest import Run

GOLDEN = Path(__file__).with_name("plan_golden.txt")
ASKED = ("plan", "--target", "gpt-oss-120b", "--gpu", "b300", "--interactivity")
QWEN = ("plan", "--target", "qwen3-8b", "--gpu", "b200", "--interactivity", "300")


def test_the_whole_answer(run: Run) -> None:
    """Golden: `dflash-trt plan … --gpu b300x8 --interactivity 500` writes it again."""
    shown = run(*ASKED, "500", "--gpu", "b300x8")
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
    measured.write_text(run.well(*asked, "--drafter", "none").out)
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
    two = ("plan", "--target", "qwen3.8-27b", "--gpu", "b200", "--acceptance", "gsm8k, t=1")
    assert run.well(*two, "--json").json["most_interactive"]["DFlash 2"]["tau"] > 5.36
    plan = run.well(*two[:-1], "overall, t=1", "--json").json
    taus = [plan["most_interactive"][kind]["tau"] for kind in ("MTP", "DFlash 2")]
    assert 2.5 < taus[0] < 2.82 < taus[1] < 3.59
    four = ("plan", "--target", "qwen3.5-4b", "--gpu", "b200", "--acceptance", "MATH-500", "--json")
    plan = run.well(*four).json
    known = {kind: one["tau"] for kind, one in plan["most_interactive"].items()}
    published = {"DFlash": 5.42, "DFlash 2": 6.76, "DSpark": 6.2}
    assert known == pytest.approx({"autoregressive": 1, **published, "MTP": known["MTP"]})
    assert 4 < known["MTP"] < 5.041
    judged = " ".join(one["table"] for one in plan["accuracy"])
    assert "DFlash 2 of 7 drafts" in judged and "MTP of 3" in judged
    deployed = ("build", *two[1:3], "--executor", "trtllm", "--profile", "b200x1")
    run(*deployed).fails(2, "TensorRT-LLM documents no DFlash 2")
    plan = run.well(*ASKED, "500", "--gpu", "b300x8", "--acceptance", "math500", "--json").json
    assert set(plan["answers"]) == {"autoregressive", "DFlash"}
    run(*QWEN, "--acceptance", "chat").fails(2, "'chat' is neither", "workload: average, GSM8K")


def test_a_number_of_gpus_stands_behind_a_name_that_is_known(run: Run) -> None:
    assert run.well(*QWEN, "--gpu", "B200X2", "--json").json["gpus"] == 2
    run(*QWEN, "--gpu", "b200x73").fails(2, "73 GPUs are not from 1 to 72")
    run(*QWEN, "--gpu", "rtx5090").fails(2, "no GPU is called 'rtx5090'", "nearest: 'rtx-5090'")

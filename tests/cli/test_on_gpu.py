"""What runs on a GPU that is named or here: `targets --gpu`, `doctor` and `plan` on a stand-in."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from dflash_trt.building.on_gpu import NEVER_RUN
from dflash_trt.hardware import chosen_gpu as card
from dflash_trt.hardware import device
from dflash_trt.proof import doctor
from tests.cli.conftest import Outcome, Run
from tests.standins.cuda import FakeCuda

Patch = pytest.MonkeyPatch
PutGpu = Callable[[FakeCuda], None]
GOLDEN = Path(__file__).with_name("targets_golden.txt")
H100 = {"arch": (9, 0), "total": 85_029_158_912, "name": "NVIDIA H100 80GB HBM3"}
ADA = {"arch": (8, 9), "total": 25_282_281_472, "name": "NVIDIA GeForce RTX 4090"}


@pytest.fixture
def put_gpu(monkeypatch: Patch) -> PutGpu:
    """Puts a GPU and its driver into this machine."""

    def put(cuda: FakeCuda) -> None:
        monkeypatch.setattr(device, "load_cuda", lambda: cuda)
        for module in (card, doctor):
            monkeypatch.setattr(module, "has_driver", lambda: True)

    return put


@pytest.fixture
def no_gpu(monkeypatch: Patch) -> None:
    for module in (card, doctor):
        monkeypatch.setattr(module, "has_driver", lambda: False)


def _pairs(outcome: Outcome) -> dict[str, list[dict[str, object]]]:
    return {name: pair["ways"] for name, pair in outcome.json["pairs"].items()}


def test_the_whole_answer(run: Run) -> None:
    """Golden: `dflash-trt targets --gpu rtx-5090` and `--gpu a100` write it again."""
    shown = "\n".join(run.well("targets", "--gpu", gpu).out for gpu in ("rtx-5090", "a100"))
    assert shown == GOLDEN.read_text(encoding="utf-8")
    # A command stands on one line, to be copied.
    plain = (line for line in shown.splitlines() if "--calibration" not in line)
    assert max(map(len, plain)) <= 120


def test_commands_print_the_same_bytes(run: Run, tmp_path: Path) -> None:
    """`targets`, `plan` and a written deployment count one pair's weights alike."""
    name, gpu = "qwen3-8b", "b200"
    listed = run("targets", "--gpu", gpu, "--json").json["pairs"][name]["weights"]
    words = ["--target", name, "--gpu", gpu, "--interactivity", 100, "--json"]
    planned = {
        int(one["target_weights"] + one["draft_weights"])
        for one in run("plan", *words).json["memory"]
        if one["layout"] == "1 GPU" and one["draft_weights"]
    }
    options = ["--executor", "trtllm", "--target", name, "--profile", f"{gpu}x1"]
    run.well("build", *options, "-o", tmp_path / "deployment")
    written = run("inspect", tmp_path / "deployment", "--json").json["memory"]["weights"]
    assert written == listed and listed in planned


@pytest.mark.parametrize("gpu", ["l40s", pytest.param("h200", marks=pytest.mark.exhaustive)])
def test_its_commands_are_taken(run: Run, tmp_path: Path, gpu: str) -> None:
    """Of deployments all is checked; engines, and what is quantised, need checkpoints first."""
    for pair, ways in _pairs(run("targets", "--gpu", gpu, "--json")).items():
        for way in ways:
            if way["executor"] == "trtllm" and "--calibration" not in way["options"]:
                run.well("build", "--target", pair, *way["options"], "-o", tmp_path / pair)
                built = run("inspect", tmp_path / pair, "--json").json
                assert min(built["max_batch"], built["memory"]["sequences"]) == way["users"]


def test_doctor_says_what_its_gpu_can_run(run: Run, put_gpu: PutGpu) -> None:
    put_gpu(FakeCuda(**H100, count=8))
    found = {one["capability"]: one for one in run("doctor", "--json").json}
    gpu = found["NVIDIA GPU"]
    assert gpu["ready"] and NEVER_RUN in gpu["detail"]
    assert gpu["detail"].startswith(f"{H100['name']} (sm_90), the first of 8, 80 GB, CUDA 13.4;")
    able = {name: one["ready"] for name, one in found.items() if name.startswith("GPU: ")}
    assert able == {
        "GPU: TensorRT-LLM deployments": True,
        "GPU: TensorRT-RTX engines": False,
        "GPU: TensorRT engines": True,
        "GPU: kernels of this project": True,
        "GPU: quantised products": True,
    }


@pytest.mark.usefixtures("no_gpu")
def test_without_a_gpu_one_is_asked_for(run: Run) -> None:
    last = run("doctor", "--json").json[-1]
    assert not last["ready"] and "dflash-trt targets --gpu h100" in last["detail"]
    for command in (
        ("plan", "--target", "qwen3-8b", "--interactivity", 50),
        ("targets", "--gpu", "HERE"),
    ):
        run(*command).fails(2, "--gpu: no GPU is found on this machine", "rtx-pro-6000, rtx-5090")


def test_plan_takes_the_gpu_that_is_here(run: Run, put_gpu: PutGpu) -> None:
    asked = ("plan", "--target", "qwen3-8b", "--interactivity", 50)
    put_gpu(FakeCuda(**H100))
    found = run.well(*asked)
    assert found.out == run.well(*asked, "--gpu", "h100").out
    assert found.err == f"note: {H100['name']} is here; its figures are of H100 SXM\n"
    put_gpu(FakeCuda(**ADA))
    run(*asked).fails(2, "no figures are known of NVIDIA GeForce RTX 4090")


def test_plan_says_what_could_run_it(run: Run) -> None:
    asked = ("plan", "--target", "gpt-oss-120b", "--gpu", "h100", "--interactivity", 20)
    shown = run.well(*asked).out
    assert (
        "H100 SXM does not multiply mxfp4: weights are read in it, and multiplied in bf16" in shown
    )
    (command,) = [line.split("  ")[1] for line in shown.splitlines() if "dflash-trt build" in line]
    assert shlex.split(command)[4:8] == ["--executor", "trtllm", "--profile", "h100x1"]
    fp8 = ("plan", "--target", "qwen3-8b", "--gpu", "a100", "--interactivity", 20)
    shown = run.well(*fp8, "--precision", "fp8").out
    assert shown.endswith("nothing here runs it so: builds for A100 SXM 80 GB refuse fp8\n")
    run(*asked[:4], "l40s", *asked[5:]).fails(
        1, "1 × L40S: no sequence", "give --gpu l40sx2, a lower"
    )

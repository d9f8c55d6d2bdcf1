"""What runs on a GPU that is named or here: `targets --gpu`, `doctor` and `plan` on a stand-in."""

from __future__ import annotations

import re
import shlex
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxruntime
import pytest

import dflash_trt.proof.doctor as doctor
from dflash_trt.building.on_gpu import NEVER_RUN
from dflash_trt.core import machine
from dflash_trt.hardware import chosen_gpu as card
from dflash_trt.hardware import device
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


CAPABILITIES = [
    "dflash-trt",
    "demo pair",
    "build graphs",
    "run on the CPU",
    "run --precision int8",
    "build TensorRT-RTX engines",
    "build TensorRT engines",
    "run with PyTorch",
    "compile kernels",
    "serve models",
    "download checkpoints",
    "import GGUF files",
    "train the demo pair",
    "run TensorRT-LLM deployments",
    "NVIDIA GPU",
]


Patch = pytest.MonkeyPatch


def _finding(outcome: Outcome, capability: str) -> Any:
    return next(one for one in outcome.json if one["capability"] == capability)


def test_lines(run: Run, monkeypatch: Patch) -> None:
    monkeypatch.setattr(doctor, "has_driver", lambda: False)  # a GPU here would have its own
    outcome = run.well("doctor")
    lines = outcome.out.splitlines()
    assert len(lines) == len(CAPABILITIES)
    for line, capability in zip(lines, CAPABILITIES, strict=True):
        assert line[:3] in ("yes", "no ") and line[5:].startswith(capability)
    json = run("doctor", "--json").json
    assert [one["capability"] for one in json] == CAPABILITIES
    assert all(one.keys() == {"capability", "ready", "detail"} for one in json)


def _without_kernel(patch: Patch, tmp_path: Path) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise RuntimeError("no kernel\nfor Attention")

    patch.setattr(onnxruntime, "InferenceSession", refuse)


@pytest.mark.parametrize(
    ("damage", "code", "capability", "pieces"),
    [
        (
            lambda patch, _: patch.setitem(sys.modules, "triton", None),
            0,
            "compile kernels",
            ["Triton language is not installed", "pip install -e '.[plugins]'"],
        ),
        (
            lambda patch, _: patch.setitem(sys.modules, "tensorrt", None),
            0,
            "build TensorRT engines",
            ["NVIDIA's package index", "the extra tensorrt brings cuda-python alone"],
        ),
        (
            lambda patch, _: patch.setattr(doctor, "installed_version", lambda name: None),
            0,
            "run TensorRT-LLM deployments",
            ["NVIDIA's container", "the extra trtllm brings what measures them"],
        ),
        (
            lambda patch, _: patch.setattr("onnx.defs.onnx_opset_version", lambda: 22),
            1,
            "build graphs",
            ["ends at opset 22, 24 is needed"],
        ),
        (_without_kernel, 1, "run on the CPU", ["RuntimeError: no kernel for Attention"]),
        (
            lambda patch, folder: patch.setattr(doctor, "data_folder", lambda name: folder / name),
            1,
            "demo pair",
            ["reinstall"],
        ),
    ],
)
def test_what_is_missing_is_named(
    run: Run,
    monkeypatch: Patch,
    tmp_path: Path,
    damage: Callable[[Patch, Path], None],
    code: int,
    capability: str,
    pieces: list[str],
) -> None:
    damage(monkeypatch, tmp_path)
    outcome = run("doctor", "--json")
    assert outcome.code == code
    finding = _finding(outcome, capability)
    assert finding["ready"] is False
    assert all(piece in finding["detail"] for piece in pieces)
    assert f"no   {capability}" in run("doctor").out


@pytest.mark.parametrize(
    ("flags", "kernels", "is_tested"),
    [
        ("avx2 avx512bw avx512_vnni avx_vnni", "AVX-512 VNNI", True),
        ("avx2 fma", "AVX2", True),
        ("avx2 avx_vnni", "avx_vnni", False),
        ("avx2 avx512bw", "avx512bw", False),
        ("asimd asimddp", "aarch64", False),
    ],
)
def test_doctor_says_which_kernels_nobody_tried(
    flags: str, kernels: str, is_tested: bool, monkeypatch: Patch, run: Run
) -> None:
    monkeypatch.setattr(machine, "_cpu_fields", lambda: {"flags": flags})
    monkeypatch.setattr(machine.platform, "machine", lambda: "aarch64")
    (line,) = [one for one in run("doctor").out.splitlines() if "int8" in one]
    assert line.split("int8")[1].strip().startswith(f"{kernels}: rows have the same bits alone")
    assert ("no test of this project has run on such kernels" in line) is not is_tested


def test_extras_that_are_named_exist() -> None:
    """In hints and docs; two of them bring less than their names promise, which is said there."""
    root = Path(__file__).parents[2]
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    texts = [*root.glob("dflash_trt/**/*.py"), *root.glob("p*/dflash_*/**/*.py")]
    texts += [root / "README.md", *root.glob("docs/*.md")]
    named = {
        name
        for path in texts
        for pair in re.findall(
            r"(?:dflash-trt|'\.)\[(\w+)\]|install_extra\(['\"](\w+)",
            path.read_text(encoding="utf-8"),
        )
        for name in filter(None, pair)
    }
    assert {"tensorrt", "trtllm"} <= named <= extras.keys()
    # The name is not this project's on the package index.
    assert not any("pip install 'dflash" in path.read_text(encoding="utf-8") for path in texts)
    assert [one.partition(">")[0] for one in extras["tensorrt"]] == ["cuda-python"]
    assert extras["trtllm"] == ["dflash-trt[perf]"]

"""`doctor`: a line per capability, the missing piece named, exit 1 when the CPU path is broken."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import onnxruntime
import pytest

import dflash_trt.proof.doctor as doctor
from tests.cli.conftest import Outcome, Run

CAPABILITIES = [
    "dflash-trt",
    "demo pair",
    "build graphs",
    "run on the CPU",
    "build TensorRT-RTX engines",
    "compile kernels",
    "serve models",
    "download checkpoints",
    "train the demo pair",
    "NVIDIA GPU",
]


def _finding(outcome: Outcome, capability: str) -> Any:
    return next(one for one in outcome.json if one["capability"] == capability)


def test_lines(run: Run) -> None:
    outcome = run.well("doctor")
    lines = outcome.out.splitlines()
    assert len(lines) == len(CAPABILITIES)
    for line, capability in zip(lines, CAPABILITIES, strict=True):
        assert line[:3] in ("yes", "no ") and line[5:].startswith(capability)
    json = run("doctor", "--json").json
    assert [one["capability"] for one in json] == CAPABILITIES
    assert all(one.keys() == {"capability", "ready", "detail"} for one in json)


def test_missing_extra(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_modelopt(name: str) -> Any:
        return None if name == "modelopt" else find_spec("json")

    monkeypatch.setattr(doctor, "find_spec", without_modelopt)
    outcome = run("doctor", "--json")
    assert outcome.code == 0  # the CPU path does not need it
    finding = _finding(outcome, "train the demo pair")
    assert finding["ready"] is False
    assert finding["detail"] == "nvidia-modelopt missing; pip install 'dflash-trt[train]'"


def test_no_compiler_for_kernels(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    finding = _finding(run("doctor", "--json"), "compile kernels")
    assert finding["ready"] is False
    assert "Triton language is not installed" in finding["detail"]
    assert "pip install 'dflash-trt[plugins]'" in finding["detail"]


def test_no_server(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr("dflash_trt.serving.server.tritonserver.NGC_BINARY", tmp_path / "none")
    monkeypatch.setattr("dflash_trt.serving.server.tritonserver._find_wheel", lambda: None)
    outcome = run.well("doctor", "--json")
    finding = _finding(outcome, "serve models")
    assert finding["ready"] is False and "there is no tritonserver" in finding["detail"]


def test_old_onnx(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnx.defs.onnx_opset_version", lambda: 22)
    outcome = run("doctor", "--json")
    assert outcome.code == 1
    finding = _finding(outcome, "build graphs")
    assert finding["ready"] is False
    assert "ends at opset 22, 24 is needed" in finding["detail"]
    assert "no   build graphs" in run("doctor").out


def test_broken_onnxruntime(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise RuntimeError("no kernel\nfor Attention")

    monkeypatch.setattr(onnxruntime, "InferenceSession", refuse)
    outcome = run("doctor", "--json")
    assert outcome.code == 1
    finding = _finding(outcome, "run on the CPU")
    assert finding["detail"] == "RuntimeError: no kernel for Attention"


def test_wrong_attention(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    real = onnxruntime.InferenceSession.run

    def shifted(self: Any, *arguments: Any) -> Any:
        return [array + 1 for array in real(self, *arguments)]

    monkeypatch.setattr(onnxruntime.InferenceSession, "run", shifted)
    outcome = run("doctor", "--json")
    assert outcome.code == 1
    assert "wrong result" in _finding(outcome, "run on the CPU")["detail"]


def test_missing_demo_pair(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "data_folder", lambda name: tmp_path / name)
    outcome = run("doctor", "--json")
    assert outcome.code == 1
    assert _finding(outcome, "demo pair")["detail"].endswith("reinstall")


@pytest.mark.parametrize(("value", "ready"), [("1", False), ("0", True), ("", True)])
def test_offline_hub(run: Run, monkeypatch: pytest.MonkeyPatch, value: str, ready: bool) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", value)
    outcome = run.well("doctor", "--json")
    assert _finding(outcome, "download checkpoints")["ready"] is ready


@pytest.mark.parametrize("driver", [False, True])
def test_gpu(run: Run, monkeypatch: pytest.MonkeyPatch, driver: bool) -> None:
    pytest.importorskip("cuda.bindings", reason="cuda-python (the rtx extra) is not installed")
    from tests.standins.cuda import FakeCuda

    monkeypatch.setattr(doctor.shutil, "which", lambda name: "/usr/bin/x" if driver else None)
    monkeypatch.setattr(doctor.Path, "exists", lambda self: False)
    cuda = FakeCuda()
    monkeypatch.setattr("dflash_trt.hardware.device.load_cuda", lambda: cuda)
    finding = _finding(run("doctor", "--json"), "NVIDIA GPU")
    assert finding["ready"] is driver
    if driver:
        assert finding["detail"].startswith("Stand-in GPU (sm_120), 1 GB, CUDA 13.4;")

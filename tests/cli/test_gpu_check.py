"""`doctor --gpu-check` on a stand-in GPU, and what it says when something is wrong."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dflash_trt.proof.gpu_check as gpu_check
from dflash_trt.backends.base import SpeculationOutput, StepCall, TargetCall, TargetOutput
from dflash_trt.backends.registry import open_executor
from dflash_trt.backends.tensorrt.library import TENSORRT
from dflash_trt.backends.tensorrt.run.executor import TensorRtExecutor
from dflash_trt.bundle.bundle import Bundle
from dflash_trt.errors import DflashError
from dflash_trt.graph.form import Precision
from tests.cli.conftest import Run
from tests.standins.plugin_tensorrt import AOT_FLAG, PluginBuilder, PluginTensorRt

pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX (the rtx extra) is not installed")
pytest.importorskip("cuda.bindings", reason="cuda-python (the rtx extra) is not installed")

from tests.standins.cuda import FakeCuda
from tests.standins.engines import add_engines, install
from tests.standins.stub_builder import FullBuilder, StubBuilder
from tests.standins.tensorrt import FakeTensorRt


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch, engine_config: Path, tmp_path: Path) -> FakeTensorRt:
    trt = FakeTensorRt(FakeCuda(arch=(9, 0)))
    install(monkeypatch, trt)

    def open_registered(bundle: Bundle) -> Any:
        add_engines(trt, bundle)
        return open_executor(bundle)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("tensorrt_rtx.Builder", StubBuilder)
    monkeypatch.setattr(gpu_check, "open_executor", open_registered)
    monkeypatch.setattr(gpu_check, "TARGET", str(engine_config))
    monkeypatch.setattr(gpu_check, "PRECISION", Precision.FLOAT16)
    monkeypatch.setattr(gpu_check, "MAX_TOKENS", 16)
    monkeypatch.setattr("dflash_trt.proof.gpu_probes.TIMED_STEPS", 3)
    return trt


def test_a_record_of_everything(run: Run, stand_in: FakeTensorRt, tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    outcome = run.well("doctor", "--gpu-check", "-o", file)
    record = json.loads(file.read_text())
    assert record["passed"] is True and record["machine"]["gpu"]["arch"] == "sm_90"
    assert record["machine"]["libraries"]["cuda-python"]
    (only,) = record["runs"]
    assert only["library"] == "TensorRT-RTX" and only["error"] is None
    verdicts = {probe["name"]: probe["passed"] for probe in only["probes"]}
    assert len(verdicts) == 9 and list(verdicts.values()).count(True) == 7
    assert outcome.out.splitlines()[0] == "Stand-in GPU (sm_90), 1.1 GB, CUDA 13.4"
    assert "yes  CUDA graphs replay the step: " in outcome.out
    assert stand_in.cuda.is_clean


class EitherBuilder(PluginBuilder):
    """Builds networks with plugins, and such without."""

    def create_network(self, flags: int) -> Any:
        return super().create_network(flags | 1 << AOT_FLAG)

    def build_serialized_network_to_stream(self, network: Any, config: Any, writer: Any) -> bool:
        return FullBuilder.build_serialized_network_to_stream(self, network, config, writer)


def test_tensorrt_is_checked_with_plugins_too(
    run: Run, stand_in: FakeTensorRt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason="Triton language (the plugins extra) is not installed")
    trt = PluginTensorRt()
    trt.Builder = EitherBuilder
    monkeypatch.setitem(sys.modules, "tensorrt", trt)
    monkeypatch.setitem(sys.modules, "tensorrt.plugin", trt.plugin)
    monkeypatch.setattr(gpu_check, "installed_libraries", lambda: [TENSORRT])
    monkeypatch.setattr("dflash_trt.proof.gpu_probes.TIMED_STEPS", 8)
    stand_in.version = "11.4.0"
    file = tmp_path / "record.json"
    outcome = run.well("doctor", "--gpu-check", "-o", file)
    plain, plugins = json.loads(file.read_text())["runs"]
    assert not plain["plugins"] and plugins["plugins"]
    assert "TensorRT 11.4.0, float16, plugins" in outcome.out
    found = {probe["name"]: probe for probe in plugins["probes"]}
    ahead = found["looking ahead changes no token"]
    assert ahead["passed"] and ahead["figures"]["begun"] > 4 and not ahead["figures"]["lost"]
    assert found["engines draw what the runtime would"]["passed"]
    assert "looking ahead changes no token" not in {probe["name"] for probe in plain["probes"]}
    assert stand_in.cuda.is_clean


def _wrong_beside_others(trt: FakeTensorRt, monkeypatch: pytest.MonkeyPatch) -> None:
    real = TensorRtExecutor.forward

    def forward(self: TensorRtExecutor, call: TargetCall) -> TargetOutput:
        output = real(self, call)
        if call.batch > 1 and output.logits is not None:
            output.logits[...] = output.logits[:, ::-1].copy()
        return output

    monkeypatch.setattr(TensorRtExecutor, "forward", forward)


def _other_tokens(trt: FakeTensorRt, monkeypatch: pytest.MonkeyPatch) -> None:
    real = TensorRtExecutor.speculate

    def speculate(self: TensorRtExecutor, call: StepCall) -> SpeculationOutput:
        output = real(self, call)
        output.choice_ids[...] = 5
        return output

    monkeypatch.setattr(TensorRtExecutor, "speculate", speculate)


@pytest.mark.parametrize(
    ("damage", "name"),
    [
        (_wrong_beside_others, "no   causality counts from each row's own length"),
        (_other_tokens, "no   tokens of DFlash block 8, batch 1 are the CPU's"),
        (
            lambda trt, patch: patch.setattr(
                "dflash_trt.hardware.device.Device.end_capture", _refuse_capture
            ),
            "no   CUDA graphs replay the step: not today",
        ),
        (
            lambda trt, patch: trt.fail.add("run"),
            "no   target_only.engine: TensorRT-RTX cannot run",
        ),
        (
            lambda trt, patch: patch.setattr(
                "dflash_trt.proof.gpu_probes.measure_speed", lambda *a, **o: 1 / 0
            ),
            "no   ZeroDivisionError: division by zero",
        ),
    ],
)
def test_what_is_wrong_is_said(
    run: Run,
    stand_in: FakeTensorRt,
    monkeypatch: pytest.MonkeyPatch,
    damage: Callable[[FakeTensorRt, pytest.MonkeyPatch], Any],
    name: str,
) -> None:
    damage(stand_in, monkeypatch)
    outcome = run("doctor", "--gpu-check")
    assert outcome.code == 1 and name in outcome.out, outcome.out


def _refuse_capture(device: Any) -> int:
    device.abandon_capture()
    raise DflashError("not today")


def test_without_a_gpu(run: Run, stand_in: FakeTensorRt, tmp_path: Path) -> None:
    stand_in.cuda.count = 0
    file = tmp_path / "record.json"
    run("doctor", "--gpu-check", "-o", file).fails(1, "no CUDA device: none is visible")
    assert not file.exists()
    run("doctor", "-o", file).fails(2, "--output is for --gpu-check")

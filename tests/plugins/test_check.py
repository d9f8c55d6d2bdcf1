"""The check on a GPU, up to the GPU: what is launched, what is found, what is written."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

pytest.importorskip("cuda.bindings", reason="cuda-python (the rtx extra) is not installed")
pytest.importorskip("triton", reason="Triton language (the plugins extra) is not installed")

from dflash_plugins import check as checking
from dflash_plugins.accept import benchmark as settling
from dflash_plugins.accept.accuracy import expect, make_inputs
from dflash_plugins.compile import CompiledKernel, compile_kernel
from dflash_plugins.kv_cache_update import benchmark as cache_update
from dflash_plugins.kv_feature_injection import benchmark as injection
from dflash_plugins.operation import DType
from dflash_plugins.row_sample import benchmark as sampling
from dflash_plugins.table import FOLDERS
from dflash_plugins.testing import gpu
from dflash_plugins.testing.gpu import KernelLauncher, TorchRunner, to_torch

from dflash_trt.hardware.device import Device
from tests.standins.cuda import FakeCuda
from tests.standins.driver import FakeDriver

HOPPER = (9, 0)


Check = Callable[..., Result]


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Check:
    """Runs the check of `accept` without times, on the GPU of a driver."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def run(cuda: FakeCuda, driver: FakeDriver, *arguments: str) -> Result:
        monkeypatch.setattr(checking, "Device", lambda: Device(cuda))
        monkeypatch.setattr(checking, "load_driver", lambda: driver)
        words = ["--operation", "accept", "--no-speed", *arguments]
        return CliRunner().invoke(checking.main, words)

    return run


def test_the_machine_code_is_launched_with_exactly_its_arguments(
    check: Check, tmp_path: Path
) -> None:
    cuda = FakeCuda(HOPPER)
    driver = FakeDriver(cuda)
    outcome = check(cuda, driver, "-o", str(tmp_path / "record.json"))
    assert outcome.exit_code == 0, outcome.output
    assert len(driver.loaded) == 1 and ".target sm_90a" in driver.loaded[0]
    assert driver.launches == [(300, 1, 1, 32, 1, 1)] * 16
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["passed"] and len(record["accuracy"]) == 16
    assert record["machine"]["gpu"]["arch"] == "sm_90"
    assert "speed" not in record
    assert "yes  accept, 16 rows: error 0, bound 0" in outcome.output
    assert cuda.is_clean


def _wrong_token(written: dict[str, Any]) -> None:
    written["bonus"][7] += 1


def _past_the_end(written: dict[str, Any]) -> None:
    last = written["new_start"]
    ctypes.c_int64.from_address(last.ctypes.data + last.nbytes).value = 0


@pytest.mark.parametrize(
    ("fault", "finding"),
    [
        ({"damage": _wrong_token}, "bonus differ"),
        ({"damage": _past_the_end}, "byte 2400 of 2400 was written"),
        *(
            ({"refuses": call}, f"no   accept, 1 rows: {call}: no kernel image is available")
            for call in ("cuModuleLoadData", "cuModuleGetFunction", "cuLaunchKernel")
        ),
    ],
)
def test_what_is_wrong_is_found(check: Check, fault: dict[str, Any], finding: str) -> None:
    cuda = FakeCuda(HOPPER)
    outcome = check(cuda, FakeDriver(cuda, **fault))
    assert outcome.exit_code == 1
    assert finding in outcome.output
    assert cuda.is_clean


@pytest.mark.parametrize(
    ("static", "dynamic", "is_opted_in"),
    [
        (0, 49_151, False),
        (0, 49_152, True),  # fits without; a byte that the driver counts would be too much
        (1024, 48_127, False),
        (1024, 48_640, True),  # over 48 KiB, of which the dynamic part alone is less
        (0, 200_000, True),
    ],
)
def test_much_shared_memory_is_opted_in_to(
    check: Check, monkeypatch: pytest.MonkeyPatch, static: int, dynamic: int, is_opted_in: bool
) -> None:
    def compile_large(*arguments: Any) -> CompiledKernel:
        kernel = compile_kernel(*arguments)
        resources = replace(kernel.resources, shared_bytes=static + dynamic)
        return replace(kernel, shared_bytes=dynamic, resources=resources)

    monkeypatch.setattr(gpu, "compile_kernel", compile_large)
    cuda = FakeCuda(HOPPER)
    driver = FakeDriver(cuda, static_shared=static)
    outcome = check(cuda, driver)
    assert outcome.exit_code == 0, outcome.output
    assert driver.opted_in == [dynamic] * is_opted_in


@pytest.mark.parametrize(
    ("cuda", "record", "message"),
    [
        (FakeCuda((8, 9)), "record.json", "there are no kernels for sm_89, Stand-in GPU"),
        (
            FakeCuda(count=0),
            "record.json",
            "no CUDA device: none is visible to this process; kernels are checked on an NVIDIA"
            " GPU; python -m dflash_plugins.compile needs none",
        ),
        (FakeCuda(HOPPER), "missing/record.json", "TMP/missing: no such folder"),
    ],
)
def test_what_cannot_be_checked_is_refused(
    check: Check, tmp_path: Path, cuda: FakeCuda, record: str, message: str
) -> None:
    outcome = check(cuda, FakeDriver(cuda), "-o", str(tmp_path / record))
    message = message.replace("TMP", str(tmp_path))
    assert (outcome.exit_code, outcome.output) == (1, f"Error: {message}\n")


class HostTorch(TorchRunner):
    """Prepares as on a GPU, on the host; time stands still."""

    def __init__(self, torch: Any, cuda: FakeCuda) -> None:
        self._torch = torch
        self._launcher = KernelLauncher(FakeDriver(cuda), "sm_90a", Path("unused"))
        self.timed = 0

    def upload(self, arrays: Any) -> Any:
        return to_torch(self._torch, arrays, "cpu")

    def prepare(self, case: Any, tensors: Any, tactic: int = 0) -> Any:
        specs = {name: tensors[name].shape for name in case.operation.inputs}
        assert specs == {name: case.inputs[name].shape for name in case.operation.inputs}
        assert case.kernel_spec(tactic).parameters
        empty = {name: self._torch.empty(one.shape) for name, one in case.outputs.items()}
        return (lambda: None), empty

    def seconds(self, work: Any) -> float:
        work()
        self.timed += 1
        return 1e-3


@pytest.mark.parametrize("benchmark", [cache_update, injection, sampling])
def test_what_is_measured_fits_its_kernel(benchmark: Any) -> None:
    import torch

    runner = HostTorch(torch, FakeCuda(HOPPER))
    found = benchmark.points()
    smallest = [point for point in found if "1 × " in point.name and "2048" not in point.name]
    for point in [*smallest[:1], *smallest[-1:]]:
        row = benchmark.measure(torch, point, runner)
        assert row["bytes_per_second"] == row["required_bytes"] / 1e-3
    assert len({point.name for point in found}) == len(found)


def test_the_time_of_settling_steps_is_measured_without_a_bandwidth() -> None:
    """A launch's time; what it is compared with settles the same tokens."""
    import torch

    runner = HostTorch(torch, FakeCuda(HOPPER))
    for case in settling.points():
        row = settling.measure(torch, case, runner)
        assert row.keys() == {"operation", "case", "seconds", "rival_seconds"}
        assert row["rival_seconds"] == {"operation by operation": 1e-3}
        inputs = make_inputs(*case.inputs["token_ids"].shape)
        found = settling.settle(torch, to_torch(torch, inputs, "cpu"))
        for tensor, (name, expected) in zip(found, expect(inputs).items(), strict=True):
            assert np.array_equal(tensor.numpy(), expected), name
    assert runner.timed == 2 * len(settling.points())
    record = {"machine": {"gpu": {"name": "G", "arch": "sm_90", "driver_cuda": "13.0"}}}
    record |= {"accuracy": [], "copy_bytes_per_second": 1e12, "speed": [row]}
    assert checking.describe(record)[-1] == (
        "  accept, 64 × 16 rows: 1,000.0 µs, operation by operation 1,000.0"
    )


def test_bits_arrive_as_they_are() -> None:
    import torch

    arrays = {dtype.name: np.arange(12).reshape(3, 4).astype(dtype.numpy) for dtype in DType}
    for name, tensor in to_torch(torch, arrays, "cpu").items():
        assert tensor.shape == (3, 4)
        assert tensor.double().tolist() == arrays[name].astype(float).tolist()


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_operation_says_what_must_be_right_and_is_measured(folder: str) -> None:
    accuracy, benchmark = checking.CHECKS[folder]
    assert callable(accuracy.check_accuracy)
    assert benchmark.points()

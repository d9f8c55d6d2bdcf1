"""The check on a GPU, up to the GPU: what is launched, what is found, what is written."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="cuda-python (the rtx extra) is not installed")
pytest.importorskip("triton", reason="Triton language (the plugins extra) is not installed")

from dflash_plugins import check as checking
from dflash_plugins.accept import checks as settling
from dflash_plugins.accept.checks import expect, make_inputs
from dflash_plugins.compile import CompiledKernel, compile_kernel
from dflash_plugins.kv_cache_update import checks as cache_update
from dflash_plugins.kv_feature_injection import checks as injection
from dflash_plugins.operation import DType
from dflash_plugins.row_sample import checks as sampling
from dflash_plugins.table import FOLDERS
from dflash_plugins.testing import gpu
from dflash_plugins.testing.gpu import KernelLauncher, TorchRunner, to_torch
from dflash_plugins.testing.numeric import Accuracy

from dflash_trt.errors import DflashError
from dflash_trt.hardware.device import Device
from tests.standins.cuda import FakeCuda
from tests.standins.driver import FakeDriver

HOPPER = (9, 0)


Check = Callable[..., list[Accuracy]]


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Check:
    """Checks `accept` on the GPU of a driver."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def run(cuda: FakeCuda, driver: FakeDriver) -> list[Accuracy]:
        with closing(Device(cuda)) as device:
            launcher = checking.open_launcher(device, driver)
            return list(checking.check_accuracy("accept", device, launcher))

    return run


def test_the_machine_code_is_launched_with_exactly_its_arguments(check: Check) -> None:
    cuda = FakeCuda(HOPPER)
    driver = FakeDriver(cuda)
    found = check(cuda, driver)
    assert found == [Accuracy(f"accept, {rows} rows", 0.0, 0.0, None) for rows in range(1, 17)]
    assert len(driver.loaded) == 1 and ".target sm_90a" in driver.loaded[0]
    assert driver.launches == [(300, 1, 1, 32, 1, 1)] * 16
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
            ({"refuses": call}, f"{call}: no kernel image is available")
            for call in ("cuModuleLoadData", "cuModuleGetFunction", "cuLaunchKernel")
        ),
    ],
)
def test_what_is_wrong_is_found(check: Check, fault: dict[str, Any], finding: str) -> None:
    cuda = FakeCuda(HOPPER)
    assert any(finding in (one.mismatch or "") for one in check(cuda, FakeDriver(cuda, **fault)))
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
    assert all(one.mismatch is None for one in check(cuda, driver))
    assert driver.opted_in == [dynamic] * is_opted_in


def test_a_gpu_without_kernels_is_refused(check: Check) -> None:
    cuda = FakeCuda((8, 9))
    with pytest.raises(DflashError, match="there are no kernels for sm_89, Stand-in GPU"):
        check(cuda, FakeDriver(cuda))


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
    said = "1,000.0 µs, operation by operation 1,000.0"
    assert checking.describe_speed(row) == said


def test_bits_arrive_as_they_are() -> None:
    import torch

    arrays = {dtype.name: np.arange(12).reshape(3, 4).astype(dtype.numpy) for dtype in DType}
    for name, tensor in to_torch(torch, arrays, "cpu").items():
        assert tensor.shape == (3, 4)
        assert tensor.double().tolist() == arrays[name].astype(float).tolist()


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_operation_says_what_must_be_right_and_is_measured(folder: str) -> None:
    checks = checking.import_checks(folder)
    assert callable(checks.check_accuracy) and checks.points()

"""The check on a GPU, up to the GPU: what is launched, what is found, what is written."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from dflash_plugins.operation import Launch, Operation, TensorSpec
from dflash_plugins.testing.guarded import Buffers, run_guarded
from dflash_plugins.testing.numeric import (
    GUARD_BYTES,
    GuardedBuffer,
    find_mismatch,
    find_other_bits,
)

pytest.importorskip("cuda.bindings", reason="cuda-python (the rtx extra) is not installed")
pytest.importorskip("triton", reason="Triton language (the plugins extra) is not installed")

from dflash_plugins import check as checking
from dflash_plugins.compile import CompiledKernel, compile_kernel
from dflash_plugins.table import FOLDERS
from dflash_plugins.testing import gpu, sdpa
from dflash_plugins.testing.gpu import Timer
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
    assert {one.name for one in found} == {f"accept, {rows} rows" for rows in range(1, 17)}
    assert all((one.error, one.mismatch) == (0.0, None) for one in found)
    assert len(driver.loaded) == 1 and ".target sm_90a" in driver.loaded[0]
    assert driver.launches == [(300, 1, 1, 32, 1, 1)] * 32
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


@pytest.mark.parametrize("folder", FOLDERS)
def test_what_is_measured_fits_its_kernel(folder: str) -> None:
    """The smallest inputs have the shapes and types of their launches."""
    points = checking.import_checks(folder).points()
    assert len({point.name for point in points}) == len(points)
    point = min(points, key=lambda one: one.cases[0].inputs[next(iter(one.cases[0].inputs))].nbytes)
    known = {name: TensorSpec.of(array) for name, array in point.inputs().items()}
    for case in point.cases:
        assert {name: known[name] for name in case.operation.inputs} == dict(case.inputs)
        known |= case.outputs


def test_a_measurement_and_one_that_does_not_fit(
    check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the events of the driver, over memory that is freed."""
    monkeypatch.setattr(gpu, "FLUSHED_BYTES", 1 << 10)
    cuda = FakeCuda(HOPPER)
    monkeypatch.setattr("dflash_trt.hardware.device.load_cuda", lambda: cuda)
    with closing(Device()) as device:
        launcher = checking.open_launcher(device, FakeDriver(cuda))
        rows = list(checking.measure("accept", device, launcher))
        assert [row["seconds"] for row in rows] == [1e-3] * 4
        assert checking.describe_speed(rows[0]) == "1,000.0 µs"
        assert len(cuda.memory) == 1, "the flushed bytes alone"
        monkeypatch.setattr(Timer, "_upload", refuse)
        assert next(checking.measure("accept", device, launcher))["error"] == "no room"
    assert cuda.is_clean


def refuse(*given: Any) -> int:
    raise DflashError("no room")


def test_the_first_wrong_coordinate_is_named() -> None:
    expected = np.ones((3, 4, 5))
    actual = expected.copy()
    actual[1, 2, 3] += 1e-3
    actual[2, 0, 0] = np.nan
    assert find_mismatch(actual, expected, 1e-4) == (
        "first at (1, 2, 3): 1.001 where 1.0 was expected (error 0.0005, bound 0.0001)"
    )
    assert find_mismatch(actual[:2], expected[:2], 1e-3) is None
    assert find_mismatch(actual, expected, 1e-3) == (
        "first at (2, 0, 0): nan where 1.0 was expected (error inf, bound 0.001)"
    )


def test_bits_differ_where_values_are_equal() -> None:
    found = find_other_bits(np.array([[0.0], [-0.0]]), np.zeros((2, 1)))
    assert found == "first at (1, 0): -0.0 where 0.0 was expected"


@pytest.mark.parametrize(("offset", "where"), [(-1, "-1"), (0, None), (7, None), (8, "8")])
def test_a_byte_outside_is_noticed(offset: int, where: str | None) -> None:
    buffer = GuardedBuffer(8)
    assert (buffer.inner.view(np.float32) != buffer.inner.view(np.float32)).all()  # NaN
    buffer.memory[GUARD_BYTES + offset] ^= 1
    if where is None:
        buffer.check("x")
        return
    with pytest.raises(AssertionError, match=f"byte {where} of 8 was written"):
        buffer.check("x")


BLOCKS = {
    "token_ids": np.arange(6).reshape(2, 3),
    "choice_ids": np.arange(6).reshape(2, 3),
    "cache_start": np.array([4, 9]),
}


@pytest.mark.parametrize(
    ("tensor", "at", "message"),
    [
        ("bonus", -8, "bonus: byte -8 of 16 was written"),
        ("accepted", 8, "accepted: byte 8 of 8 was written"),
        ("choice_ids", 0, "choice_ids is an input only"),
    ],
)
def test_a_write_where_none_belongs_is_noticed(tensor: str, at: int, message: str) -> None:
    def write(
        operation: Operation, launch: Launch, specs: Mapping[str, TensorSpec], buffers: Buffers
    ) -> None:
        assert launch.grid == (2, 1, 1)
        assert list(specs) == [*BLOCKS, *operation.outputs]
        buffer = buffers[tensor]
        buffer.memory[buffer.offset + at] ^= 1

    with pytest.raises(AssertionError, match=message):
        run_guarded("accept", BLOCKS, {}, 0, write)


def test_pytorchs_attention_is_timed_beside_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over plain caches alone, cut to what is held, as many rows and heads as ours."""
    torch = pytest.importorskip("torch")
    seen: list[tuple[Any, ...]] = []

    def attend(q: Any, k: Any, v: Any, *, attn_mask: Any, enable_gqa: bool) -> None:
        seen.append((tuple(q.shape), tuple(k.shape), attn_mask is not None and attn_mask.sum()))
        assert attn_mask is None or attn_mask.shape == (q.shape[2], k.shape[2])

    event = SimpleNamespace(record=lambda: None, synchronize=lambda: None, elapsed_time=lambda e: 2)
    stand_in = SimpleNamespace(
        bfloat16=None,
        uint8=None,
        bool=torch.bool,
        randn=lambda shape, **_: torch.empty(shape, device="meta"),
        ones=lambda *shape, dtype, device: torch.ones(*shape, dtype=dtype),
        empty=lambda *_, **__: torch.empty(1),
        cuda=SimpleNamespace(is_available=lambda: True, Event=lambda enable_timing: event),
        nn=SimpleNamespace(functional=SimpleNamespace(scaled_dot_product_attention=attend)),
    )
    monkeypatch.setattr(sdpa, "import_module", lambda name: stand_in)
    points = {one.name: one for one in checking.import_checks("block_attention").points()}
    assert sdpa.sdpa_seconds(points["qwen3-8b, 1 × 1024 positions, bf16"]) == 2e-3
    sdpa.sdpa_seconds(points["qwen3-8b target, chunk of 512 at 0, bf16"])
    block, chunk = seen[0], seen[-1]
    assert block == ((1, 32, 16, 128), (1, 8, 1040, 128), False)
    assert chunk == ((1, 32, 512, 128), (1, 8, 512, 128), 512 * 513 // 2)
    others = ("qwen3-8b, 1 × 1024 positions, bf16 paged", "qwen3-8b, 1 × 1024 positions, fp8e4nv")
    assert [sdpa.sdpa_seconds(points[one]) for one in others] == [None, None]

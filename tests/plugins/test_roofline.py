"""The least time of a kernel: what fits a multiprocessor, what memory gives, what is printed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dflash_plugins import roofline
from dflash_plugins.check import describe_speed, measure
from dflash_plugins.compile import CompiledKernel
from dflash_plugins.machine_code import Resources
from dflash_plugins.roofline import LATENCY_S, LAUNCH_S, REACH, MemoryRates, open_predictor

from dflash_trt.hardware.gpus import arches, find_gpu


def memory(name: str) -> MemoryRates:
    gpu = find_gpu(name)
    assert gpu.sms is not None
    return MemoryRates(gpu, arches()[gpu.arch], gpu.sms)


def kernel(threads: int, registers: int, shared: int) -> CompiledKernel:
    resources = Resources(registers, shared, 0, 0, 0)
    return CompiledKernel("f", "", "", b"", threads, shared, resources)


@pytest.mark.parametrize(
    ("name", "took", "resident"),
    [
        ("h200", (128, 184, 114_688), 2),
        ("h200", (256, 162, 1024), 1),
        ("h200", (128, 129, 0), 3),
        ("rtx-pro-6000", (128, 32, 50_176), 2),
        ("rtx-pro-6000", (128, 32, 50_177), 1),
        ("rtx-pro-6000", (256, 16, 0), 6),
    ],
)
def test_programs_of_a_multiprocessor(name: str, took: tuple[int, int, int], resident: int) -> None:
    """By registers, by shared memory and by threads, each with what the system rounds and keeps."""
    assert memory(name).resident(kernel(*took)) == resident


def test_few_programs_do_not_fill_the_memory() -> None:
    h200, one = memory("h200"), kernel(128, 32, 65_536)
    assert h200.bandwidth(one, 1) == pytest.approx((65_536 + 128 * 32 * 4) / LATENCY_S["sm_90"])
    assert h200.bandwidth(one, 10) == pytest.approx(10 * h200.bandwidth(one, 1))
    assert h200.bandwidth(one, 1000) == pytest.approx(REACH * h200.gpu.bandwidth)


class Card:
    """An H200, as a driver describes it."""

    name, arch, total_bytes = "NVIDIA H200", "sm_90", 141 * 10**9


class Torch:
    class cuda:  # noqa: N801
        OutOfMemoryError = MemoryError
        empty_cache = staticmethod(lambda: None)


def test_a_measurement_has_the_least_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an operation whose bytes nobody counts, those of its tensors; of unknown GPUs, nothing."""
    monkeypatch.setattr(roofline, "compile_kernel", lambda *given: kernel(32, 32, 0))
    predict: Any = open_predictor(Card, Path("unused"))  # type: ignore[arg-type]
    runner: Any = None
    found: Callable[..., Any] = lambda *given: {"seconds": 2e-6, "rival_seconds": {}}  # noqa: E731
    monkeypatch.setattr("dflash_plugins.accept.checks.measure", found)
    row = next(measure("accept", Torch, runner, 1e12, predict))
    assert row["least_seconds"] == pytest.approx(LAUNCH_S + LATENCY_S["sm_90"], rel=0.1)
    assert describe_speed(row) == "2.0 µs, at least 1.6"
    monkeypatch.setattr(Card, "name", "NVIDIA GB10")
    assert open_predictor(Card, Path("unused")) is None  # type: ignore[arg-type]

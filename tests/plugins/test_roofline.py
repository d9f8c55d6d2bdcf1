"""The least time of a kernel: what fits a multiprocessor, what memory gives, least times."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from dflash_plugins import roofline
from dflash_plugins.accept.launch import make_case
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


def test_a_known_gpu_has_least_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an operation whose bytes nobody counts, those of its tensors; of unknown GPUs, nothing."""
    monkeypatch.setattr(roofline, "compile_kernel", lambda *given: kernel(32, 32, 0))
    predict: Any = open_predictor(Card, Path("unused"))  # type: ignore[arg-type]
    cases = [make_case("", batch=1, rows=8)]
    assert predict(cases, None) == pytest.approx(LAUNCH_S + LATENCY_S["sm_90"], rel=0.1)
    monkeypatch.setattr(Card, "name", "NVIDIA GB10")
    assert open_predictor(Card, Path("unused")) is None  # type: ignore[arg-type]

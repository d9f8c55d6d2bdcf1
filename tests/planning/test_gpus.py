"""GPUs as data: known by name, complete, and consistent with what data sheets round."""

from __future__ import annotations

import pytest

from dflash_trt.errors import DflashError
from dflash_trt.hardware.arch import ARCHES
from dflash_trt.hardware.gpu import find_gpu, gpu_names

NAMES = "h100 h200 b200 b300 gb200 gb300 rtx-pro-6000 rtx-5090 l40s".split()


def test_the_known_ones() -> None:
    assert gpu_names() == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_figures_are_dense_and_of_one_gpu(name: str) -> None:
    gpu = find_gpu(name)
    assert gpu.memory_bytes <= ARCHES[gpu.arch].largest_bytes
    assert gpu.source and gpu.title
    assert 0.3e12 < gpu.bandwidth <= 8e12
    # Halving the operands doubles the dense rate; FP4 is favoured by Blackwell Ultra and GeForce.
    if gpu.fp8 is not None:
        assert gpu.fp8 / gpu.bf16 == pytest.approx(2, rel=0.02)
        if gpu.fp4 is not None:
            factor = 4 if name == "rtx-5090" else 3 if gpu.arch == "sm_103" else 2
            assert gpu.fp4 / gpu.fp8 == factor
    assert (gpu.fp4 is not None) == (int(gpu.arch.removeprefix("sm_")) >= 100)


def test_missing_precisions_fall_back_to_the_next_wider() -> None:
    h100, b200 = find_gpu("H100"), find_gpu("b200")
    assert h100.flops("fp4") == h100.fp8
    assert b200.flops("fp4") == 9e15 and b200.flops("fp8") == 4.5e15


def test_an_unknown_gpu_names_the_nearest() -> None:
    with pytest.raises(DflashError, match="nearest: 'b300'") as caught:
        find_gpu("b30")
    assert caught.value.exit_code == 2

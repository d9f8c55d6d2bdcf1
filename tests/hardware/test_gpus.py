"""GPUs as data: known by name, complete, and consistent with what data sheets round."""

from __future__ import annotations

import pytest

from dflash_trt.core.formats import Format
from dflash_trt.deploy.trtllm.schema import ATTENTION_BACKENDS
from dflash_trt.errors import DflashError
from dflash_trt.hardware.gpus import arches, find_gpu, gpu_names, match_gpu

NAMES = "rtx-pro-6000 rtx-5090 gb10 l40s b300 gb300 b200 gb200 h100 h200 a40 a100".split()


def test_the_known_ones() -> None:
    assert gpu_names() == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_figures_are_dense_and_of_one_gpu(name: str) -> None:
    gpu = find_gpu(name)
    assert gpu.source and gpu.title and gpu.link_gpus % gpu.node_gpus == 0
    assert 0.2e12 < gpu.bandwidth <= 8e12
    # Halving the operands doubles the dense rate; FP4 is favoured by Blackwell Ultra and GeForce.
    if gpu.fp8 is not None:
        assert gpu.fp8 / gpu.bf16 == pytest.approx(2, rel=0.02)
        if gpu.fp4 is not None:
            factor = 4 if name == "rtx-5090" else 3 if gpu.arch == "sm_103" else 2
            assert gpu.fp4 / gpu.fp8 == factor
    assert (gpu.fp4 is not None) == (int(gpu.arch.removeprefix("sm_")) >= 100)


def test_weights_in_missing_precisions_are_multiplied_in_bf16() -> None:
    h100, b200 = find_gpu("H100"), find_gpu("b200")
    assert h100.flops(Format.NVFP4) == h100.bf16
    assert b200.flops(Format.NVFP4) == 9e15 and b200.flops(Format.FP8) == 4.5e15


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("b30", "'b30' (nearest: 'b300', of 270 GB);"),
        ("A100-40GB", "'A100-40GB' (nearest: 'a100', of 80 GB);"),
        ("h100x8", "'h100x8' (leave out 'x8': the GPU is 'h100');"),
        ("", "'';"),
    ],
)
def test_an_unknown_gpu_says_what_may_be_meant(name: str, hint: str) -> None:
    with pytest.raises(DflashError) as caught:
        find_gpu(name)
    assert f"no GPU is called {hint} choose one of rtx-pro-6000, " in str(caught.value)
    assert str(caught.value).count("rtx-5090") == 1 and caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("name", "arch", "gigabytes", "known"),
    [
        ("NVIDIA H100 80GB HBM3", "sm_90", 85, "h100"),
        ("NVIDIA H200", "sm_90", 150, "h200"),
        ("NVIDIA A100-SXM4-80GB", "sm_80", 85, "a100"),
        ("NVIDIA A100-SXM4-40GB", "sm_80", 42, None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "sm_90", 10, None),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "sm_120", 102, "rtx-pro-6000"),
        ("NVIDIA GeForce RTX 5090", "sm_120", 33, "rtx-5090"),
        ("NVIDIA GeForce RTX 5090 Laptop GPU", "sm_120", 25, None),
        ("NVIDIA RTX 6000 Ada Generation", "sm_89", 51, None),
        ("NVIDIA A400", "sm_86", 48, None),
        ("NVIDIA A40", "sm_89", 48, None),
    ],
)
def test_what_drivers_call_them(name: str, arch: str, gigabytes: int, known: str | None) -> None:
    found = match_gpu(name, arch, gigabytes * 10**9)
    assert (found and found.name) == known


def test_the_largest_memory_of_an_architecture_is_that_of_a_gpu() -> None:
    gpus = [find_gpu(name) for name in NAMES]
    for name, arch in arches().items():
        assert arch.name == name
        assert arch.largest_bytes == max(gpu.memory_bytes for gpu in gpus if gpu.arch == name)
        assert {gpu.formats for gpu in gpus if gpu.arch == name} == {arch.formats}
    assert arches()["sm_100"].largest_bytes == 186 * 10**9


def test_architectures_are_complete() -> None:
    for arch in arches().values():
        assert arch.devices and arch.source
        assert arch.kernels in (None, f"{arch.name}a")
        assert arch.tensorrt_rtx in (None, f"SM{arch.number}")
        assert arch.draft_attention in ATTENTION_BACKENDS
        assert arch.limits_source
        assert arch.shared_bytes in (99 << 10, 163 << 10, 227 << 10)
        # The system keeps a KiB of each block's; an SM has threads for at least one of the largest.
        assert arch.sm_shared_bytes == arch.shared_bytes + 1024
        assert arch.sm_threads in (1536, 2048)
        assert (arch.registers, arch.thread_registers, arch.threads) == (65_536, 255, 1024)
        assert (arch.plain_shared_bytes, arch.ptx) == (49_152, (8, 8))
    large = {name for name, arch in arches().items() if arch.shared_bytes == 232_448}
    assert large == {"sm_90", "sm_100", "sm_103"}
    assert arches()["sm_120"].shared_bytes == 101_376

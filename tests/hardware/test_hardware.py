"""Cores and GPUs: counted and known by name; one file of data changes every command."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from dflash_trt.core.formats import Format
from dflash_trt.deploy.planning import known_pairs
from dflash_trt.deploy.trtllm.schema import ATTENTION_BACKENDS
from dflash_trt.errors import DflashError
from dflash_trt.hardware import gpus
from dflash_trt.hardware.cores import AUTO, SMALL_TARGET, choose_threads, count_cores
from dflash_trt.hardware.gpus import arches, find_gpu, gpu_names, match_gpu
from dflash_trt.models import build_config as config
from tests.cli.conftest import Run, run

__all__ = ["run"]

CGROUP, KUBE, TOP = "proc/self/cgroup", "0::/kube/pod", "sys/fs/cgroup"
NAMES = gpu_names()
PAIR, ARCH, GPU = "qwen3-8b", "sm_100", "b200"
MEMORY_GB, LAYERS = 100, 18


def _machine(root: Path, files: dict[str, str], cores: int, threads: int = 2) -> Path:
    """Cores of `threads` hardware threads each, numbered as Linux does, and further files."""
    for cpu in range(cores * threads):
        siblings = ",".join(str(cpu % cores + cores * other) for other in range(threads))
        name = f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        files = {**files, name: siblings}
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    return root


@pytest.mark.parametrize(
    ("cpus", "files", "expected"),
    [
        ({0, 1, 2}, None, 3),  # a machine that tells nothing
        (range(16), {}, 8),
        ({0, 8}, {}, 1),  # one core's two hardware threads
        ({0, 1, 9}, {}, 2),
        (range(16), {CGROUP: KUBE, f"{TOP}/kube/pod/cpu.max": "300000 100000"}, 3),
        (range(16), {CGROUP: KUBE, f"{TOP}/kube/cpu.max": "250000 100000"}, 2),
        (range(16), {CGROUP: KUBE, f"{TOP}/kube/cpu.max": "50000 100000"}, 1),
        (range(16), {CGROUP: KUBE, f"{TOP}/kube/pod/cpu.max": "max 100000"}, 8),
    ],
)
def test_cores_of_a_machine(
    tmp_path: Path, cpus: set[int], files: dict[str, str] | None, expected: int
) -> None:
    root = tmp_path if files is None else _machine(tmp_path, files, 8)
    assert count_cores(set(cpus), root) == expected


def test_a_small_target_gets_one_thread_and_wishes_are_kept() -> None:
    assert choose_threads(AUTO, SMALL_TARGET - 1) == 1
    assert choose_threads(7, 1) == 7
    script = "from dflash_trt.hardware.cores import *; print(choose_threads(AUTO, SMALL_TARGET));"
    one = min(os.sched_getaffinity(0))
    pinned = f"import os; os.sched_setaffinity(0, {{{one}}}); {script}"
    done = subprocess.run([sys.executable, "-c", pinned], capture_output=True, check=True)
    assert done.stdout == b"1\n"


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
        # The system keeps a KiB of each block's.
        assert arch.sm_shared_bytes == arch.shared_bytes + 1024
    large = {name for name, arch in arches().items() if arch.shared_bytes == 227 << 10}
    assert large == {"sm_90", "sm_100", "sm_103"}


def _rewrite(source: Path, copy: Path, change: Any) -> None:
    raw = yaml.safe_load(source.read_text(encoding="utf-8"))
    change(raw)
    copy.write_text(yaml.safe_dump(raw, sort_keys=False), encoding="utf-8")


def _change_arch(raw: dict[str, Any]) -> None:
    """An sm_100 that TensorRT-RTX builds for, with other kernels and smaller GPUs."""
    record = raw[ARCH]
    record |= {"tensorrt_rtx": "SM100", "kernels": f"{ARCH}f", "draft_attention": "FA4"}
    for gpu in record["gpus"].values():
        gpu["memory_gb"] = MEMORY_GB


def _change_pair(raw: dict[str, Any]) -> None:
    """Half of the target's layers, under another description, for fewer sequences."""
    raw["description"] = "half of Qwen3-8B"
    raw["shape"]["target"]["layers"] = LAYERS
    raw["shape"]["draft"]["target_layer_ids"] = [1, 5, 9, 13, 16]
    raw["profiles"][f"{GPU}x1"]["max_batch"] = 3


@pytest.fixture
def changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The data that ships with the project, in a copy of its own with both changes."""
    configs = tmp_path / "build_configs"
    shutil.copytree(config.data_folder("build_configs"), configs)
    _rewrite(configs / f"{PAIR}.yaml", configs / f"{PAIR}.yaml", _change_pair)
    copy = tmp_path / "gpus.yaml"
    _rewrite(gpus.GPUS_FILE, copy, _change_arch)
    shipped = config.data_folder

    def data_folder(name: str) -> Path:
        return configs if name == "build_configs" else shipped(name)

    for module in (config, known_pairs):
        monkeypatch.setattr(module, "data_folder", data_folder)
    monkeypatch.setattr(gpus, "GPUS_FILE", copy)


@pytest.mark.usefixtures("changed")
def test_every_command_follows(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX (the rtx extra) is not installed")
    pytest.importorskip("triton", reason="Triton language (the plugins extra) is not installed")

    said = {one["capability"]: one["detail"] for one in run("doctor", "--json").json}
    assert f", {ARCH}," in said["build TensorRT-RTX engines"]
    assert f"{ARCH}f" in said["compile kernels"]

    assert run("targets", "--json").json[PAIR]["description"] == "half of Qwen3-8B"

    words = ["--target", PAIR, "--gpu", GPU, "--interactivity", 100, "--json"]
    memory = run("plan", *words).json["memory"][0]
    assert memory["gpu_memory"] == MEMORY_GB * 10**9
    assert memory["target_weights"] < 10e9  # 16.4 with all of its layers

    engines = ["--executor", "tensorrt-rtx", "--arch", ARCH, "--max-batch", 1 << 20]
    outcome = run("build", "--target", "demo", *engines, "-o", tmp_path / "engines")
    outcome.fails(2, f"exceed the largest {ARCH} device, {MEMORY_GB},000,000,000 bytes")

    folder = tmp_path / "deployment"
    words = ["--executor", "trtllm", "--target", PAIR, "--profile", f"{GPU}x1", "-o", folder]
    assert run("build", *words).code == 0
    arguments = yaml.safe_load((folder / "serve" / "dflash.yaml").read_text(encoding="utf-8"))
    assert arguments["max_batch_size"] == 3
    assert arguments["speculative_config"]["attention_backend"] == "FA4"
    written = run("inspect", folder, "--json").json["memory"]
    assert written["gpu_memory"] == MEMORY_GB * 10**9
    assert written["weights"] == pytest.approx(memory["target_weights"], rel=0.3)

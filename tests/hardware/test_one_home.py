"""One record of the hardware table and one public pair change, and every command follows."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from dflash_trt.deploy.planning import known_pairs
from dflash_trt.hardware import gpus
from dflash_trt.models import build_config as config
from tests.cli.conftest import Run, run

__all__ = ["run"]

PAIR, ARCH, GPU = "qwen3-8b", "sm_100", "b200"
MEMORY_GB, LAYERS = 100, 18


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

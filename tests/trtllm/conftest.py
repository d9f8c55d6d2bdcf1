"""The command line, a tiny pair with a hardware profile, and what a deployment needs beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from dflash_trt.models.build_config import load_config
from tests.cli.bigram import write_bigram_pair
from tests.cli.conftest import Run, run

__all__ = ["Run", "run"]

PROFILES = """\
profiles:
  one: {gpu: b200, max_batch: 4, max_seq_len: 64}
"""
TORCH = """
class cuda:
    device_count = staticmethod(lambda: 1)
    get_device_capability = staticmethod(lambda index: (10, 0))
    get_device_properties = staticmethod(lambda index: type("x", (), {"total_memory": 178 << 30}))
"""
"""As far as preflight.py asks: one B200."""
QWEN3 = ("build", "--executor", "trtllm", "--target", "qwen3-8b", "--profile", "b200x1")


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The YAML of a tiny Qwen3 pair that no test changes."""
    path = write_bigram_pair(tmp_path_factory.mktemp("pair"))
    with path.open("a", encoding="utf-8") as file:
        file.write(PROFILES)
    return path


def own_profile(folder: Path, name: str, profile: str) -> Path:
    """A copy of a shipped configuration with one profile of its own, below `folder`."""
    values = yaml.safe_load(load_config(name)[1].read_text(encoding="utf-8"))
    values["profiles"] = {"own": {"max_seq_len": 4096, **yaml.safe_load(f"{{{profile}}}")}}
    path = folder / "own.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return path


def build_deployment(run: Run, output: Path, *options: object) -> dict[str, Any]:
    """Builds a deployment; what `inspect` says of it."""
    run.well("build", "--executor", "trtllm", *options, "-o", output)
    shown: dict[str, Any] = run("inspect", output, "--json").json
    return shown


def serve_yaml(folder: Path, variant: str) -> dict[str, Any]:
    """A variant's LLM arguments."""
    text = (folder / "serve" / f"{variant}.yaml").read_text(encoding="utf-8")
    arguments: dict[str, Any] = yaml.safe_load(text)
    return arguments


def write_schedule(path: Path, blocks: Sequence[tuple[int, int]], executor: str = "cpu") -> Path:
    """A block schedule of (max_batch, block_size) as `tune` writes it, measured on `executor`."""
    entries = [{"max_batch": batch, "block_size": block} for batch, block in blocks]
    record = {"schema_version": 1, "blocks": entries, "executor": executor}
    path.write_text(json.dumps(record), encoding="utf-8")
    return path


def install_tensorrt_llm(
    folder: Path, model: str, launcher: str, environment: Mapping[str, str]
) -> dict[str, str]:
    """`environment` with a TensorRT-LLM and what it needs below `folder`, as far as scripts look.

    Args:
        model: its Triton model's model.py.
        launcher: the script that starts a server.
    """
    package, models = folder / "python" / "tensorrt_llm", folder / "llmapi" / "tensorrt_llm" / "1"
    launch = folder / "bin" / "trtllm-llmapi-launch"
    for made in (package, models, launch.parent):
        made.mkdir(parents=True)
    (package / "__init__.py").write_text("print('a banner')\n__version__ = '1.3.0rc29'\n")
    (package.parent / "flashinfer.py").touch()
    (package.parent / "huggingface_hub.py").touch()  # there is no network
    (package.parent / "torch.py").write_text(TORCH)
    (models / "model.py").write_text(model)
    launch.write_text(f"#!/bin/sh\n{launcher}\n")
    launch.chmod(0o755)
    return {
        **environment,
        "PATH": f"{launch.parent}:{environment['PATH']}",
        "PYTHONPATH": str(package.parent),
        "LLMAPI": str(folder / "llmapi"),
        "TMPDIR": str(folder),
    }

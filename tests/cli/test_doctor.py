"""`doctor`: a line per capability, the missing piece named, exit 1 when the CPU path is broken."""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxruntime
import pytest

import dflash_trt.proof.doctor as doctor
from tests.cli.conftest import Outcome, Run

CAPABILITIES = [
    "dflash-trt",
    "demo pair",
    "build graphs",
    "run on the CPU",
    "build TensorRT-RTX engines",
    "build TensorRT engines",
    "compile kernels",
    "serve models",
    "download checkpoints",
    "import GGUF files",
    "train the demo pair",
    "run TensorRT-LLM deployments",
    "NVIDIA GPU",
]


Patch = pytest.MonkeyPatch


def _finding(outcome: Outcome, capability: str) -> Any:
    return next(one for one in outcome.json if one["capability"] == capability)


def test_lines(run: Run, monkeypatch: Patch) -> None:
    monkeypatch.setattr(doctor, "has_driver", lambda: False)  # a GPU here would have its own
    outcome = run.well("doctor")
    lines = outcome.out.splitlines()
    assert len(lines) == len(CAPABILITIES)
    for line, capability in zip(lines, CAPABILITIES, strict=True):
        assert line[:3] in ("yes", "no ") and line[5:].startswith(capability)
    json = run("doctor", "--json").json
    assert [one["capability"] for one in json] == CAPABILITIES
    assert all(one.keys() == {"capability", "ready", "detail"} for one in json)


def _without_kernel(patch: Patch, tmp_path: Path) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise RuntimeError("no kernel\nfor Attention")

    patch.setattr(onnxruntime, "InferenceSession", refuse)


@pytest.mark.parametrize(
    ("damage", "code", "capability", "pieces"),
    [
        (
            lambda patch, _: patch.setitem(sys.modules, "triton", None),
            0,
            "compile kernels",
            ["Triton language is not installed", "pip install 'dflash-trt[plugins]'"],
        ),
        (
            lambda patch, _: patch.setitem(sys.modules, "tensorrt", None),
            0,
            "build TensorRT engines",
            ["NVIDIA's package index", "'dflash-trt[tensorrt]' brings cuda-python alone"],
        ),
        (
            lambda patch, _: patch.setattr(doctor, "installed_version", lambda name: None),
            0,
            "run TensorRT-LLM deployments",
            ["NVIDIA's container", "'dflash-trt[trtllm]' brings what measures them"],
        ),
        (
            lambda patch, _: patch.setattr("onnx.defs.onnx_opset_version", lambda: 22),
            1,
            "build graphs",
            ["ends at opset 22, 24 is needed"],
        ),
        (_without_kernel, 1, "run on the CPU", ["RuntimeError: no kernel for Attention"]),
        (
            lambda patch, folder: patch.setattr(doctor, "data_folder", lambda name: folder / name),
            1,
            "demo pair",
            ["reinstall"],
        ),
    ],
)
def test_what_is_missing_is_named(
    run: Run,
    monkeypatch: Patch,
    tmp_path: Path,
    damage: Callable[[Patch, Path], None],
    code: int,
    capability: str,
    pieces: list[str],
) -> None:
    damage(monkeypatch, tmp_path)
    outcome = run("doctor", "--json")
    assert outcome.code == code
    finding = _finding(outcome, capability)
    assert finding["ready"] is False
    assert all(piece in finding["detail"] for piece in pieces)
    assert f"no   {capability}" in run("doctor").out


def test_extras_that_are_named_exist() -> None:
    """In hints and docs; two of them bring less than their names promise, which is said there."""
    root = Path(__file__).parents[2]
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    texts = [*root.glob("dflash_trt/**/*.py"), *root.glob("p*/dflash_*/**/*.py")]
    texts += [root / "README.md", *root.glob("docs/*.md")]
    named = {
        name
        for path in texts
        for name in re.findall(r"dflash-trt\[(\w+)\]", path.read_text(encoding="utf-8"))
    }
    assert {"tensorrt", "trtllm"} <= named <= extras.keys()
    assert [one.partition(">")[0] for one in extras["tensorrt"]] == ["cuda-python"]
    assert extras["trtllm"] == ["dflash-trt[perf]"]

"""`build --executor tensorrt-rtx`: what it shows, and nothing left behind when it fails."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dflash_trt.backends.tensorrt.build.builder as builder
import dflash_trt.backends.tensorrt.library as library
from tests.cli.conftest import Build, Run, write_config

RTX = ["--executor", "tensorrt-rtx"]


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """The YAML of a pair small enough to build engines of in a second."""
    from tests.reference.checkpoints import write_draft, write_target

    folder = tmp_path / "pair"
    write_target(folder / "target", num_layers=2, head_dim=64)
    write_draft(folder / "draft", folder / "target", num_layers=1, target_layer_ids=[0, 1])
    return write_config(folder, max_seq_len=128, max_batch=2)


def _need_library() -> Any:
    return pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed")


def test_missing_library(
    run: Run, build: Build, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", None)
    pieces = ("TensorRT-RTX is not installed", "pip install -e '.[rtx]'")
    assert "head size" not in build(small, *RTX).fails(1, *pieces)
    said = {one["capability"]: one for one in run("doctor", "--json").json}
    finding = said["build TensorRT-RTX engines"]
    assert finding["ready"] is False and "'.[rtx]'" in finding["detail"]


def _refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.standins.stub_builder import StubBuilder

    make_logger = library.make_logger

    class Refusing(StubBuilder):
        def build_serialized_network_to_stream(self, *_: Any) -> bool:
            return False

    def make_failing_logger(trt: Any) -> Any:
        logger = make_logger(trt)
        logger.errors.append("Error Code 10: a kernel is\nmissing")
        return logger

    monkeypatch.setattr("tensorrt_rtx.Builder", Refusing)
    monkeypatch.setattr(builder, "make_logger", make_failing_logger)


def _fill_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    make_writer = builder.make_writer

    def make_full_writer(trt: Any, file: Any) -> Any:
        class Full:
            def write(self, data: bytes) -> int:
                file.write(data[:100])
                raise OSError(28, "No space left on device", str(file.name))

        return make_writer(trt, Full())

    monkeypatch.setattr(builder, "make_writer", make_full_writer)


def _lose_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builder.summarize_network

    def lossy(trt: Any, network: Any) -> Any:
        summary = real(trt, network)
        summary.attentions.pop()
        summary.cache_updates.remove("target_v_1")
        summary.layers["SOFTMAX"] = 1
        return summary

    monkeypatch.setattr(builder, "summarize_network", lossy)


@pytest.mark.parametrize(
    ("damage", "pieces"),
    [
        (_refuse, ["target.onnx", "TensorRT-RTX cannot build it", "a kernel is missing"]),
        (_fill_disk, ["No space left on device", "nothing was left behind"]),
        (
            _lose_attention,
            [
                "target.onnx",
                "no native attention for layers.1/attention/attend",
                "no in-place update of target_v_1",
                "1 decomposed softmax",
            ],
        ),
    ],
)
def test_nothing_is_left_behind(
    build: Build,
    small: Path,
    monkeypatch: pytest.MonkeyPatch,
    damage: Callable[[pytest.MonkeyPatch], None],
    pieces: list[str],
) -> None:
    _need_library()
    damage(monkeypatch)
    build(small, *RTX).fails(1, *pieces)


def test_engines_are_shown_and_need_a_gpu(
    run: Run, build: Build, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _need_library()
    output = build.folder
    built = build.well(small, *RTX, "--precision", "fp16")
    assert "engines for sm_120 in float16: target " in built.out
    assert "(2 × 128 positions, allocated whole)" in built.out
    text = run("inspect", output).out
    assert "for executor tensorrt-rtx (float16 compute)" in text
    assert "for sm_120, caches of 128 positions (the draft" in text
    assert "2 fused attentions, 6 cache updates" in text
    answer = run("inspect", output, "--json").json
    assert answer["engines"]["arch"] == "sm_120"
    assert answer["cache_bytes_per_token"]["target"] == 2 * 2 * 2 * 64 * 2
    files = {file["path"]: file["bytes"] for file in answer["files"]}
    engines = {one["graph"]: files[one["path"]] for one in answer["engines"]["files"]}
    assert answer["memory_bytes"]["draft_weights"] == engines["draft"]
    # Without a tokenizer these would fail as well, later and for another reason.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for command in (["generate", "--prompt", "a"], ["verify"]):
        run(command[0], output, *command[1:]).fails(1, "no CUDA device: ", "--executor cpu")

"""Bundles of engines on a stand-in GPU: built, run, and refused before anything is loaded."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_trt.cli.main import main
from tests.cli.conftest import Build, Run, edit_manifest

pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX (the rtx extra) is not installed")
pytest.importorskip("cuda.bindings", reason="cuda-python (the rtx extra) is not installed")

from tests.standins.cuda import FakeCuda
from tests.standins.stub_builder import FullTensorRt, StubBuilder
from tests.standins.tensorrt import FakeTensorRt, stand_in

ABAB = "ababababab"

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture(scope="module")
def rtx_bundle(engine_config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Engines of the bigram pair; float16, which ONNX Runtime computes on a CPU as well."""
    folder = tmp_path_factory.mktemp("rtx") / "bundle"
    options = ["--executor", "tensorrt-rtx", "--precision", "fp16", "--max-seq-len", "128"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tensorrt_rtx.Builder", StubBuilder)
        assert main(["build", "--target", str(engine_config), *options, "-o", str(folder)]) == 0
    return folder


def test_generate(
    run: Run, rtx_bundle: Path, monkeypatch: pytest.MonkeyPatch, own_cache: Path
) -> None:
    cuda = FakeCuda()
    trt = stand_in(monkeypatch, rtx_bundle, cuda)
    trt.kernels = b"kernels"
    outcome = run.well("generate", rtx_bundle, "--prompt", "b", "--max-tokens", 10, "--json")
    assert outcome.json["text"] == ABAB
    assert cuda.is_clean
    (cache,) = own_cache.glob("*.cache")
    assert cache.read_bytes() == b"kernels"


def _engine(folder: Path) -> Path:
    return folder / "engines" / "tensorrt-rtx-sm_120" / "draft.engine"


@pytest.mark.parametrize(
    ("damage", "pieces"),
    [
        (
            lambda folder, trt: setattr(trt.cuda, "arch", (9, 0)),
            ["built for sm_120, this GPU is sm_90 (Stand-in GPU)", "--arch sm_90"],
        ),
        (
            lambda folder, trt: edit_manifest(
                folder, lambda one: one["engines"].update(library_version="1.6.0.5")
            ),
            ["built with TensorRT-RTX 1.6.0.5, installed is 1.7"],
        ),
        (
            lambda folder, trt: edit_manifest(
                folder,
                lambda one: one["engines"]["files"][1]["operations"].update(
                    TRT_Attention_lower_right="native"
                ),
            ),
            ["attention reads by key/value lengths", "build the bundle again"],
        ),
        (
            lambda folder, trt: edit_manifest(folder, lambda one: one["engines"]["files"].pop(1)),
            ["holds no draft engine", "build the bundle again"],
        ),
        (
            lambda folder, trt: _engine(folder).write_bytes(_engine(folder).read_bytes()[:5]),
            ["draft.engine", "has 5 bytes, the manifest says"],
        ),
    ],
)
def test_what_cannot_run_is_refused_in_one_line(
    run: Run,
    rtx_bundle: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    damage: Callable[[Path, FakeTensorRt], Any],
    pieces: list[str],
) -> None:
    folder = shutil.copytree(rtx_bundle, tmp_path / "bundle")
    cuda = FakeCuda()
    trt = stand_in(monkeypatch, folder, cuda)
    damage(folder, trt)
    run("generate", folder, "--prompt", "b").fails(1, *pieces)
    assert cuda.is_clean and trt.executions == 0


FULL = ["--executor", "tensorrt", "--precision", "fp16", "--max-seq-len", "100"]


def test_tensorrt_builds_for_the_gpu_that_is_here(
    run: Run,
    build: Build,
    engine_config: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda, full = FakeCuda(), FullTensorRt()
    monkeypatch.setitem(sys.modules, "tensorrt", full)
    monkeypatch.setattr("dflash_trt.hardware.device.load_cuda", lambda: cuda)
    shown = build.well(engine_config, *FULL)
    assert "engines for sm_120 in float16" in shown.out
    output, manifest = build.folder, build.manifest
    assert manifest["executor"] == "tensorrt" and manifest["libraries"]["tensorrt"] == "11.4.0"
    assert manifest["engines"]["cache_length"] == 112
    assert (output / "engines" / "tensorrt-sm_120" / "target.engine").is_file()
    trt = stand_in(monkeypatch, output, cuda)
    trt.version = "11.4.0"
    outcome = run.well("generate", output, "--prompt", "b", "--max-tokens", 10, "--json")
    assert outcome.json["text"] == ABAB
    assert "for executor tensorrt (float16 compute)" in run("inspect", output).out

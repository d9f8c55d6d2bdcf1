"""Bundles of engines with paged FP8 caches: built, run and looked at, on a stand-in GPU."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX (the rtx extra) is not installed")
pytest.importorskip("cuda.bindings", reason="cuda-python (the rtx extra) is not installed")
pytest.importorskip("triton", reason="Triton language (the plugins extra) is not installed")

from dflash_trt.cli.main import main
from dflash_trt.core.limits import MAX_COUNT
from tests.cli.bigram import write_bigram_pair
from tests.cli.conftest import Run, edit_manifest, split_short_caches
from tests.standins.cuda import FakeCuda
from tests.standins.plugin_tensorrt import stand_in_builder
from tests.standins.tensorrt import FakeTensorRt, stand_in

ENGINES = ["--executor", "tensorrt", "--precision", "fp16", "--plugins", "--max-seq-len", "128"]
CACHES = ["--kv-layout", "paged", "--page-size", "16", "--kv-pages", "20", "--kv-dtype", "fp8"]
SPLIT = 64

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bigram pair of a head size that has kernels."""
    return write_bigram_pair(tmp_path_factory.mktemp("bigram"), head_dim=64, layers=4)


@pytest.fixture(scope="module")
def fp8(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty pages of 16 for up to four sequences of 128, which split attention reads."""
    folder = tmp_path_factory.mktemp("fp8")
    with pytest.MonkeyPatch.context() as patch:
        stand_in_builder(patch, folder)
        split_short_caches(patch, SPLIT)
        command = ["build", "--target", str(config), *ENGINES, *CACHES]
        assert main([*command, "-o", str(folder / "bundle")]) == 0
    return folder / "bundle"


def run_on(monkeypatch: pytest.MonkeyPatch, folder: Path) -> FakeTensorRt:
    trt = stand_in(monkeypatch, folder, FakeCuda())
    trt.version = "11.4.0"
    return trt


def test_a_manifest_that_lies_is_refused_in_one_line(
    run: Run, fp8: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an engine finds is in tests/backends/tensorrt/test_pages_on_engines.py."""
    folder = shutil.copytree(fp8, tmp_path / "bundle")
    trt = run_on(monkeypatch, folder)
    edit_manifest(folder, lambda one: one["page_pool"].update(pages=MAX_COUNT))
    pieces = ("paged caches", "pages of 16 positions", "do not fit Stand-in GPU", "--kv-pages")
    run("generate", folder, "--prompt", "b").fails(1, *pieces)
    edit_manifest(folder, lambda one: one.update(kv_dtype="auto"))
    edit_manifest(folder, lambda one: one["page_pool"].update(pages=20))
    pieces = ("target_k_0 is FP8, the manifest says HALF",)
    run("generate", folder, "--prompt", "b").fails(1, *pieces)
    edit_manifest(folder, lambda one: one["engines"].update(draws=False))
    paged = {"page_size": 16, "pages": 20}
    for pool, dtype in ((paged, "auto"), (None, "fp8")):
        held = {"page_pool": pool, "kv_dtype": dtype}
        edit_manifest(folder, lambda one, held=held: one.update(executor="tensorrt-rtx", **held))
        run("generate", folder, "--prompt", "b").fails(1, "paged or FP8 caches do not go with")
    assert trt.cuda.is_clean and trt.executions == 0

"""Engine bundles, each built once a session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from dflash_trt.backends.tensorrt.build.builder import EngineOptions
from dflash_trt.backends.tensorrt.library import find_arch
from dflash_trt.building.spec import BuildSpec
from dflash_trt.bundle.bundle import Bundle
from dflash_trt.graph.form import Precision
from dflash_trt.models.pair_check import Pair
from tests.pairs import write_bundle

BuildEngines = Callable[..., Bundle]


@pytest.fixture(scope="session")
def build_engines(tmp_path_factory: pytest.TempPathFactory) -> BuildEngines:
    """Builds an engine bundle of a pair."""
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX (the rtx extra) is not installed")
    return lambda *args, **kwargs: build(tmp_path_factory.mktemp("engines"), *args, **kwargs)


def build(
    folder: Path,
    pair: Pair,
    precision: Precision,
    arch: str = "sm_120",
    **limits: int,
) -> Bundle:
    engines = EngineOptions(find_arch(arch), precision)
    limits = {"max_batch": 2, "max_seq_len": 256, "prefill_chunk": 64} | limits
    return write_bundle(pair, folder / "bundle", BuildSpec(), engines=engines, **limits)

"""Engine bundles, each built once a session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from dflash_trt.backends.tensorrt.build.builder import EngineOptions
from dflash_trt.backends.tensorrt.library import find_arch
from dflash_trt.bundle.build import BuildOptions, build_bundle
from dflash_trt.bundle.bundle import Bundle, open_bundle
from dflash_trt.checkpoints.pair import Pair
from dflash_trt.config import BuildConfig
from dflash_trt.core.progress import Progress, Unit
from dflash_trt.graph.form import Precision


class RecordedProgress:
    """Remembers the stages and how far each came."""

    def __init__(self) -> None:
        self.stages: list[tuple[str, int | None, Unit]] = []
        self.reached: list[int] = []

    def stage(self, name: str, total: int | None, unit: Unit = "bytes") -> None:
        self.stages.append((name, total, unit))
        self.reached.append(0)

    def advance(self, count: int) -> None:
        assert count > 0
        self.reached[-1] += count


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
    *,
    progress: Progress | None = None,
    max_batch: int = 2,
    max_seq_len: int = 256,
) -> Bundle:
    config = BuildConfig.model_validate(
        {
            "description": "a tiny random pair",
            "target": {"checkpoint": "target"},
            "draft": {"checkpoint": "draft"},
            "max_seq_len": max_seq_len,
            "max_batch": max_batch,
            "prefill_chunk": 64,
        }
    )
    options = BuildOptions(engines=EngineOptions(find_arch(arch), precision))
    bundle = folder / "bundle"
    build_bundle(pair, config, "tiny", bundle, options, progress or RecordedProgress())
    return open_bundle(bundle)

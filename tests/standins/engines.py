"""Stand-ins under a command that opens a bundle of engines."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_trt.backends.tensorrt.build.profiles import profiles
from dflash_trt.bundle.bundle import open_bundle
from dflash_trt.memory.caches import engine_cache_length
from tests.standins.cuda import FakeCuda
from tests.standins.tensorrt import FakeTensorRt, Plan


def stand_in(monkeypatch: pytest.MonkeyPatch, folder: Path, cuda: FakeCuda) -> FakeTensorRt:
    """Puts a stand-in GPU and library under everything that opens the bundle in `folder`."""
    trt = FakeTensorRt(cuda)
    bundle = open_bundle(folder)
    assert bundle.manifest.engines is not None
    limits = bundle.manifest.limits
    length = engine_cache_length(limits, bundle.manifest.target.sizes, bundle.manifest.graph_form)
    for engine in bundle.manifest.engines.files:
        graph = folder / f"{engine.graph}.onnx"
        plan = Plan(graph, profiles(engine.graph, limits), length, bundle.manifest.page_pool)
        trt.add(folder / engine.path, plan)
    monkeypatch.setattr("dflash_trt.hardware.device.load_cuda", lambda: cuda)
    monkeypatch.setattr(
        "dflash_trt.backends.tensorrt.run.open_engines.load_library", lambda library: trt
    )
    return trt

"""Stand-ins under a command that opens a bundle of engines."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_trt.backends.tensorrt.build.profiles import profiles
from dflash_trt.backends.tensorrt.library import LIBRARIES
from dflash_trt.bundle.bundle import Bundle, open_bundle
from dflash_trt.bundle.memory.cache_bytes import engine_cache_length
from tests.standins.cuda import FakeCuda
from tests.standins.tensorrt import FakeTensorRt, Plan


def add_engines(trt: FakeTensorRt, bundle: Bundle) -> None:
    """Makes the engines of `bundle`, if it has any, known to the library."""
    manifest = bundle.manifest
    length = engine_cache_length(manifest.limits, manifest.target.sizes, manifest.graph_form)
    engines, pool = manifest.engines, manifest.page_pool
    for engine in engines.files if engines else ():
        graph = bundle.folder / f"{engine.graph}.onnx"
        built = profiles(engine.graph, manifest.limits, LIBRARIES[manifest.executor])
        plan = Plan(graph, built, length, pool, has_plugins=engines.draws)
        trt.add(bundle.folder / engine.path, plan)


def install(monkeypatch: pytest.MonkeyPatch, trt: FakeTensorRt) -> None:
    """Puts the library and its GPU under everything that opens a bundle."""
    monkeypatch.setattr("dflash_trt.hardware.device.load_cuda", lambda: trt.cuda)
    monkeypatch.setattr(
        "dflash_trt.backends.tensorrt.run.open_engines.load_library", lambda library: trt
    )


def stand_in(monkeypatch: pytest.MonkeyPatch, folder: Path, cuda: FakeCuda) -> FakeTensorRt:
    """Puts a stand-in GPU and library under everything that opens the bundle in `folder`."""
    trt = FakeTensorRt(cuda)
    add_engines(trt, open_bundle(folder))
    install(monkeypatch, trt)
    return trt

"""Opens a bundle of engines, once it is clear that they are for this machine."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from dflash_trt.backends.base import ExecutorLimits
from dflash_trt.backends.device.executor import DeviceExecutor
from dflash_trt.backends.device.passes import PassBundle
from dflash_trt.backends.tensorrt.library import LIBRARIES, load_library
from dflash_trt.backends.tensorrt.run.engines import Loader
from dflash_trt.bundle.bundle import Bundle
from dflash_trt.core.user_cache import user_cache_file
from dflash_trt.errors import DflashError
from dflash_trt.graph.bindings import GRAPH_NAMES, GraphName
from dflash_trt.graph.tensors import CacheLayout
from dflash_trt.hardware.device import Device
from dflash_trt.hardware.kernels import PLUGIN_INTERFACE

LENGTHY = {f"TRT_Attention_{name}" for name in ("lower_right", "none", "masked")}
"""Attention of earlier releases' engines, by the names of its forms (graph/functions.py)."""


def open_device(bundle: Bundle) -> Device:
    """The GPU that `bundle` has engines for; nothing of the bundle is loaded.

    Raises:
        DflashError: the library is missing or another version than the engines were built with,
            their plugins have another interface, there is no GPU, or one of another architecture.
    """
    engines, library = bundle.manifest.engines, LIBRARIES[bundle.manifest.executor]
    assert engines is not None

    def refusal(what: str, fix: str) -> DflashError:
        return DflashError(what, where=bundle.folder, fix=fix)

    installed = str(load_library(library).__version__)
    if installed != engines.library_version:
        raise refusal(
            f"built with {library.name} {engines.library_version}, installed is {installed}",
            "engines run with the version that built them; install it, or build again",
        )
    if any(name in LENGTHY for one in engines.files for name in one.operations):
        raise refusal(
            f"{bundle.manifest.created_by} built engines whose attention reads by key/value "
            "lengths, with which TensorRT may answer with wrong tokens",
            "build the bundle again",
        )
    built = engines.plugin_interface
    if engines.has_plugins and built != PLUGIN_INTERFACE:
        known = "an older interface" if built is None else f"interface {built}"
        raise refusal(
            f"{bundle.manifest.created_by} built its plugins with {known}, this release's have "
            f"interface {PLUGIN_INTERFACE}: operands differ, or what they mean",
            "build the bundle again",
        )
    device = Device()
    if device.arch != engines.arch:
        device.close()
        raise refusal(
            f"built for {engines.arch}, this GPU is {device.arch} ({device.name})",
            f"build with --arch {device.arch}, or with --executor cpu",
        )
    return device


def open_engines(
    bundle: Bundle, limits: ExecutorLimits, layout: CacheLayout, graphs: Iterable[GraphName]
) -> DeviceExecutor:
    """The executor of a bundle of engines, with those of `graphs` loaded.

    Raises:
        DflashError: see open_device; or an engine is missing, damaged or unlike its manifest, or
            the device has no room.
    """
    manifest, engines = bundle.manifest, bundle.manifest.engines
    assert engines is not None
    paths = {engine.graph: bundle.folder / engine.path for engine in engines.files}
    missing = [graph for graph in GRAPH_NAMES if graph not in paths]
    if missing:
        raise DflashError(
            f"holds no {missing[0]} engine", where=bundle.folder, fix="build the bundle again"
        )
    plugin_caches = {engine.graph: engine.plugin_caches for engine in engines.files}
    device = open_device(bundle)
    try:
        library = LIBRARIES[manifest.executor]
        # What engines compile at run time follows their content.
        hashes = {file.path: file.sha256 for file in manifest.files}
        content = " ".join(str(hashes[engine.path]) for engine in engines.files)
        name = f"kernels-{hashlib.sha256(content.encode()).hexdigest()[:16]}.cache"
        kernel_cache = user_cache_file(name) if library.is_rtx else None
        executor = DeviceExecutor(
            PassBundle(paths, plugin_caches, limits, layout, manifest.graph_form),
            device,
            Loader(library, load_library(library), kernel_cache),
        )
        executor.preload(graphs)
    except BaseException:
        device.close()
        raise
    return executor

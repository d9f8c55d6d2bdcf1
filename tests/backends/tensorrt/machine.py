"""A pair's engines on a stand-in GPU beside the CPU's executor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from dflash_plugins.table import operations

from dflash_trt.backends.base import ExecutorLimits
from dflash_trt.backends.device.executor import DeviceExecutor
from dflash_trt.backends.device.passes import PassBundle
from dflash_trt.backends.tensorrt.build.plugins import plugin_caches
from dflash_trt.backends.tensorrt.build.profiles import profiles
from dflash_trt.backends.tensorrt.library import LIBRARIES
from dflash_trt.backends.tensorrt.run.engines import Loader
from dflash_trt.bundle.memory.cache_bytes import engine_cache_length
from dflash_trt.decoding import Generator, Request, RequestResult, SamplingParams
from dflash_trt.graph.bindings import GRAPH_NAMES
from dflash_trt.graph.form import GraphForm
from dflash_trt.graph.tensors import Role, cache_layout
from dflash_trt.hardware.device import Device
from tests.pairs import TinyPair
from tests.standins.cuda import FakeCuda
from tests.standins.tensorrt import FakeTensorRt, Plan

SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}
REQUESTS = [
    Request(prompt_ids=(3, 1, 4, 1, 5, 9, 2, 6), max_tokens=24),
    Request(prompt_ids=tuple(range(2, 39)), max_tokens=9),
    Request(
        prompt_ids=(2, 7, 1, 8, 2, 8),
        max_tokens=20,
        sampling=SamplingParams(temperature=0.9, top_k=20, top_p=0.9, seed=5),
    ),
    Request(prompt_ids=(5, 5, 5), max_tokens=14, block_size=3),
    Request(prompt_ids=(8, 2), max_tokens=30, speculate=False),
    Request(prompt_ids=(1, 2, 3), max_tokens=17, sampling=SamplingParams(temperature=1.2, seed=8)),
    Request(prompt_ids=tuple(range(20)), max_tokens=500),  # to the end of the context
]


def run_alone(built: TinyPair, requests: Sequence[Request], **given: Any) -> list[RequestResult]:
    """Each request by itself on the CPU's executor; `given` are arguments of its generator."""
    executor = built.open()
    generator = Generator(executor, **given)
    results = [generator.generate([request])[0] for request in requests]
    executor.close()
    return results


@dataclass
class Machine:
    """A stand-in GPU with a pair's engines."""

    cuda: FakeCuda
    trt: FakeTensorRt
    bundle: PassBundle
    library: str
    folder: Path

    def caches(self, executor: DeviceExecutor) -> dict[str, np.ndarray]:
        """Every cache, all slots of it."""
        slots = {"B": executor.limits.max_batch}
        return {
            one.name: self.cuda.array(
                executor.caches.address(one.name, 0), one.sized(slots), np.float32
            )
            for one in self.bundle.tensors("target")
            if one.role is Role.CACHE
        }

    def open(self) -> DeviceExecutor:
        library = LIBRARIES[self.library]
        cache = self.folder / "kernels.cache" if library.is_rtx else None
        return DeviceExecutor(self.bundle, Device(self.cuda), Loader(library, self.trt, cache))


def make_machine(
    built: TinyPair,
    folder: Path,
    library: str,
    graphs: Path,
    *,
    draws: bool = False,
    prefill_chunk: int = 16,
) -> Machine:
    """A stand-in whose engines, in `folder`, run the graphs in the folder `graphs`."""
    manifest = built.bundle.manifest
    cuda = FakeCuda()
    trt = FakeTensorRt(cuda)
    cpu = built.open()
    cpu_limits = replace(
        cpu.limits, prefill_chunk=prefill_chunk, takes_any_chunk=False, draws=draws
    )
    cpu.close()
    length = engine_cache_length(manifest.limits, manifest.target.sizes, manifest.graph_form)
    has_plugins = draws or cpu_limits.page_pool is not None
    known = set(operations()) if has_plugins else set()
    paths, caches = {}, {}
    for graph in GRAPH_NAMES:
        paths[graph] = folder / f"{graph}.engine"
        paths[graph].write_text(f"engine of {graph}")
        plan = Plan(
            graphs / f"{graph}.onnx",
            profiles(graph, cpu_limits, LIBRARIES[library]),
            length,
            cpu_limits.page_pool,
            has_plugins,
        )
        trt.add(paths[graph], plan)
        caches[graph] = plugin_caches(onnx.load(plan.graph, load_external_data=False), known)
    form = engine_form(length, cpu_limits, draws=draws)
    layout = cache_layout(form, manifest.target.sizes, manifest.draft.sizes)
    bundle = PassBundle(paths, caches, cpu_limits, layout, form)
    return Machine(cuda, trt, bundle, library, folder)


def engine_form(length: int, limits: ExecutorLimits, *, draws: bool = False) -> GraphForm:
    """The form of float32 graphs that stand for engines of `limits`."""
    pool = limits.page_pool
    replay = limits.block_size if limits.has_state else None
    form = GraphForm(
        cache_length=length,
        page_size=None if pool is None else pool.page_size,
        draws=draws,
        replay=replay,
    )
    return form.with_pages(pool)

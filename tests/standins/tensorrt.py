"""A TensorRT that runs a graph on ONNX Runtime over the memory of a FakeCuda.

Public names are the library's own (a test holds them to the installed wheel). It is as strict as
the real one is said to be: shapes within the context's profile, aligned addresses that somebody
allocated, caches updated in place, memory given before a run, and nothing captured that has not run
before with the same shapes. It tells of no cache that a plugin updates in place, and counts what
costs the real one dearly: shapes, and contexts that change theirs.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from dflash_trt.backends.tensorrt.build.profiles import profiles
from dflash_trt.backends.tensorrt.library import LIBRARIES
from dflash_trt.bundle.bundle import Bundle, open_bundle
from dflash_trt.bundle.memory.cache_bytes import engine_cache_length
from tests.standins.cuda import FakeCuda

pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX (the rtx extra) is not installed")

import tensorrt_rtx as real

from dflash_trt.backends.onnxruntime.session import open_session
from dflash_trt.backends.tensorrt.build.profiles import Profile
from dflash_trt.core.limits import PagePool
from dflash_trt.graph.bindings import (
    CANDIDATE_IDS,
    CANDIDATE_LOGITS,
    CANDIDATES,
    LOGIT_ROWS,
    LOGITS,
    PAGE_TABLE,
    SAMPLING,
    page_table_input,
)
from dflash_trt.graph.functions import DFLASH_DOMAIN
from tests.graph.functions import FLOAT8, run_session
from tests.sampling.definitions import pick_candidates
from tests.standins.held_pages import HeldPages

SCRATCH_BYTES = 5000
TYPES = {
    "tensor(float8e4m3fn)": FLOAT8,
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(int32)": np.int32,
    "tensor(int64)": np.int64,
}
NATIVE = {
    np.float32: "FLOAT",
    np.float16: "HALF",
    np.int64: "INT64",
    np.int32: "INT32",
    FLOAT8: "FP8",
}


@dataclass(frozen=True)
class Plan:
    """What stands for an engine file: a graph, its profiles, M, and the pages of its pools.

    With plugins, kernels compute what is a function of this project's in the graph.
    """

    graph: Path
    profiles: Sequence[Profile]
    cache_length: int
    pool: PagePool | None = None
    has_plugins: bool = False

    def axis(self, size: int | str) -> int:
        """An axis of a tensor: dynamic ones as -1, what an engine fixes of the caches' as it is."""
        fixed = {"M": self.cache_length}
        if self.pool is not None:
            fixed |= {"pages": self.pool.pages + 1, "C": self.pool.cover(self.cache_length)}
            fixed |= {f"pages_{kind.window}": kind.pages + 1 for kind in self.pool.windowed}
        return size if isinstance(size, int) else fixed.get(size, -1)


class FakeTensorRt:
    """The module; `plans` stand for engines by the SHA-256 of their files.

    `shapes` are those that each graph has run with, B, S and R; `contexts` are those that live,
    `shape_changes` counts how often one got another shape. `guards` are told of every cache that a
    run writes, by name: its address, and what it held before and holds after.
    """

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        self.plans: dict[str, Plan] = {}
        self.executions = 0
        self.shapes: set[tuple[str, tuple[int, ...]]] = set()
        self.shape_changes = 0
        self.contexts: weakref.WeakSet[FakeContext] = weakref.WeakSet()
        self.guards: list[Callable[[str, int, np.ndarray, np.ndarray], None]] = []
        self.kernels = b""
        self.messages: list[str] = []
        self.fail: set[str] = set()
        self.version = str(real.__version__)

    @property
    def __version__(self) -> str:
        return self.version

    def __getattr__(self, name: str) -> Any:
        return getattr(real, name)

    def add(self, engine: Path, plan: Plan) -> None:
        self.plans[hashlib.sha256(engine.read_bytes()).hexdigest()] = plan

    def Runtime(self, logger: Any) -> FakeRuntime:  # noqa: N802
        return FakeRuntime(self, logger)


class FakeRuntime:
    def __init__(self, module: FakeTensorRt, logger: Any) -> None:
        self._module, self._logger = module, logger

    def deserialize_cuda_engine(self, serialized_engine: Any) -> FakeEngine | None:
        plan = self._module.plans.get(hashlib.sha256(serialized_engine).hexdigest())
        if plan is None:
            self._logger.log(real.ILogger.Severity.ERROR, "the engine is\nnot mine")
            return None
        return FakeEngine(self._module, self._logger, plan)


class FakeEngine:
    def __init__(self, module: FakeTensorRt, logger: Any, plan: Plan) -> None:
        self._module, self._logger, self._plan = module, logger, plan
        self._session = open_session(plan.graph, 1)
        tensors = [*self._session.get_inputs(), *self._session.get_outputs()]
        self._types = {tensor.name: TYPES[tensor.type] for tensor in tensors}
        self._shapes = {tensor.name: [*map(plan.axis, tensor.shape)] for tensor in tensors}
        # A CPU's graph stands for an engine's, whose logits come with candidates unless it draws.
        self._adds_candidates = LOGITS in self._shapes and not (
            {CANDIDATE_IDS, SAMPLING} & self._shapes.keys()
        )
        if self._adds_candidates:
            kept = min(CANDIDATES, self._shapes[LOGITS][2])
            for name, kind in ((CANDIDATE_IDS, np.int64), (CANDIDATE_LOGITS, np.float32)):
                self._types[name], self._shapes[name] = kind, [-1, -1, kept]
        self._inputs = [tensor.name for tensor in self._session.get_inputs()]
        graph = onnx.load(plan.graph, load_external_data=False).graph
        # Pools by the page table that finds their rows, as every node that has both says.
        self._tables: dict[str, str] = {}
        for node in graph.node:
            tables = {name for name in node.input if name.startswith(PAGE_TABLE)}
            for name in node.input:
                if tables and name in self._inputs and name not in tables:
                    assert {self._tables.setdefault(name, *tables)} == tables, name
        called = {output: node.domain for node in graph.node for output in node.output}
        self._plugin_made = {
            name for name, domain in called.items() if plan.has_plugins and domain == DFLASH_DOMAIN
        }
        self.num_io_tensors = len(self._shapes)
        self.num_optimization_profiles = len(plan.profiles)

    def get_tensor_name(self, index: int) -> str:
        return list(self._shapes)[index]

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._shapes[name])

    def get_tensor_dtype(self, name: str) -> Any:
        return getattr(real.DataType, NATIVE[self._types[name]])

    def get_aliased_input_tensor(self, name: str) -> str | None:
        """TensorRT tells of its own updates alone: a plugin's alias is None, in place as it is."""
        return None if name in self._plugin_made else self._updated(name)

    def _updated(self, name: str) -> str | None:
        """The cache in whose memory the output `name` lies."""
        own = name.removesuffix("_out")
        return own if own != name and own in self._inputs else None

    def get_device_memory_size_for_profile_v2(self, profile_index: int) -> int:
        # Every graph wants another amount, so that the shared memory has to grow.
        return SCRATCH_BYTES * len(self._inputs) + profile_index

    def create_runtime_config(self) -> FakeRuntimeConfig:
        return FakeRuntimeConfig(self._module)

    def create_execution_context(self, options: Any) -> FakeContext | None:
        strategy = getattr(options, "_strategy", options)
        assert strategy == real.ExecutionContextAllocationStrategy.USER_MANAGED
        return None if "context" in self._module.fail else FakeContext(self)


class FakeRuntimeConfig:
    def __init__(self, module: FakeTensorRt) -> None:
        self._module = module
        self._strategy: Any = None
        self.dynamic_shapes_kernel_specialization_strategy: Any = None

    def set_execution_context_allocation_strategy(self, strategy: Any) -> None:
        self._strategy = strategy

    def create_runtime_cache(self) -> FakeRuntimeCache:
        return FakeRuntimeCache(self._module)

    def set_runtime_cache(self, cache: FakeRuntimeCache) -> bool:
        return isinstance(cache, FakeRuntimeCache)


class FakeRuntimeCache:
    def __init__(self, module: FakeTensorRt) -> None:
        self._module = module

    def deserialize(self, blob: bytes) -> bool:
        accepted = blob.startswith(b"kernels")
        if accepted:
            self._module.kernels = blob
        return accepted

    def serialize(self) -> bytes:
        return self._module.kernels


class FakeContext:
    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine
        self._cuda = engine._module.cuda
        self._profile: Profile | None = None
        self._sizes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}
        self._scratch = (0, 0)
        self._settled = False
        self._changes = 0
        self._engine._module.contexts.add(self)

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        assert stream_handle in self._cuda.streams
        self._profile = self._engine._plan.profiles[profile_index]
        return True

    def set_device_memory(self, memory: int, size: int) -> None:
        assert self._cuda.owns(memory, size) and memory % 256 == 0
        self._scratch, self._settled = (memory, size), False

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        fixed = self._engine._shapes[name]
        fits = len(fixed) == len(shape) and all(
            want in (-1, size) for want, size in zip(fixed, shape, strict=True)
        )
        if not fits or name not in self._engine._inputs or "shape" in self._engine._module.fail:
            self._say(f"{name} does not take {shape}")
            return False
        if self._sizes.get(name) != tuple(shape):
            self._engine._module.shape_changes += name in self._sizes
            self._settled = False
            self._changes += 1
        self._sizes[name] = tuple(shape)
        return True

    def set_tensor_address(self, name: str, memory: int) -> bool:
        if name not in self._engine._shapes or memory % 256:
            self._say(f"{name} at {memory}")
            return False
        self._addresses[name] = memory
        return True

    def execute_async_v3(self, stream_handle: int) -> bool:
        module, engine, cuda = self._engine._module, self._engine, self._cuda
        assert stream_handle in cuda.streams and self._profile is not None
        assert self._addresses.keys() == engine._shapes.keys()
        self._check_sizes()
        address, size = self._scratch
        assert size >= engine.get_device_memory_size_for_profile_v2(0)
        if (cuda.recording is not None and not self._settled) or "run" in module.fail:
            self._say("a run that cannot be captured" if cuda.recording is not None else "broken")
            return False
        self._settled = True
        alive, changes = weakref.ref(self), self._changes
        addresses, sizes = dict(self._addresses), dict(self._sizes)

        def run() -> None:
            context = alive()
            assert context is not None and context._changes == changes, "a stale graph"
            assert cuda.owns(address, size), "its memory is gone"
            cuda.array(address, (size,), np.uint8)[...] = 0xEE
            execute(engine, addresses, sizes)

        cuda.submit(stream_handle, run)
        return True

    def _check_sizes(self) -> None:
        sizes = self._sizes
        ids = next(sizes[name] for name in ("token_ids", "block_ids") if name in sizes)
        axes = {"B": ids[0], "S": ids[1]}
        if "logit_rows" in sizes:
            axes["R"] = sizes["logit_rows"][1]
        assert self._profile is not None
        for axis, span in self._profile.axes.items():
            assert span.low <= axes[axis] <= span.high, (self._profile.name, axes)
        self._engine._module.shapes.add((self._engine._plan.graph.stem, tuple(axes.values())))
        fixed = {name for name, shape in self._engine._shapes.items() if shape[0] != -1}
        assert {sizes[name][0] for name in sizes.keys() - fixed} == {axes["B"]}
        assert sizes.keys() == set(self._engine._inputs)

    def _say(self, message: str) -> None:
        self._engine._logger.log(real.ILogger.Severity.ERROR, message)


def execute(
    engine: FakeEngine, addresses: Mapping[str, int], sizes: Mapping[str, tuple[int, ...]]
) -> None:
    """Runs the graph on what lies at `addresses`; outputs go where theirs say."""
    cuda, session = engine._module.cuda, engine._session
    engine._module.executions += 1
    feeds = {
        name: cuda.array(addresses[name], sizes[name], engine._types[name])
        for name in engine._inputs
    }
    starts = feeds["cache_start"]
    rows = next(feeds[name] for name in ("token_ids", "block_ids") if name in feeds).shape[1]
    assert (starts >= 0).all() and (starts + rows <= engine._plan.cache_length).all()
    held: dict[str, HeldPages] = {}
    if (pool := engine._plan.pool) is not None:
        own = feeds[LOGIT_ROWS].max(1) + 1 if LOGIT_ROWS in feeds else [rows] * len(starts)
        for window, count in pool.kinds.items():
            if (table := page_table_input(window)) in feeds:
                found = feeds[table], starts, rows, own
                held[table] = HeldPages(count, pool.page_size, *found, window)
    pages = {
        name: held[engine._tables.get(name, PAGE_TABLE)]
        for name in feeds
        if held and engine._shapes[name][0] != -1
    }
    feeds |= {name: of_pool.mask(feeds[name]) for name, of_pool in pages.items()}
    results = run_session(session, feeds)
    if engine._adds_candidates:
        count = engine._shapes[CANDIDATE_IDS][2]
        ids = pick_candidates(results[LOGITS], count, engine._module.executions)
        results[CANDIDATE_IDS] = ids
        results[CANDIDATE_LOGITS] = np.take_along_axis(results[LOGITS], ids, axis=-1)
    for name, result in results.items():
        source = engine._updated(name)
        assert source is None or addresses[source] == addresses[name], f"{name} is not in place"
        memory = cuda.array(addresses[name], result.shape, result.dtype)
        if source is None:
            memory[...] = result
            continue
        before = memory.copy() if engine._module.guards else memory
        if source in pages:
            pages[source].write(memory, result)
        else:
            memory[...] = result
        for guard in engine._module.guards:
            guard(source, addresses[name], before, memory)


FAKES: dict[type, Any] = {
    FakeRuntime: real.Runtime,
    FakeEngine: real.ICudaEngine,
    FakeContext: real.IExecutionContext,
    FakeRuntimeConfig: real.IRuntimeConfig,
    FakeRuntimeCache: real.IRuntimeCache,
}


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

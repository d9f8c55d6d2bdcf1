"""What tests look at inside executors and generators: the one place that knows private names."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from unittest.mock import Mock

import numpy as np

from dflash_trt.backends.base import Executor, FloatArray
from dflash_trt.backends.device.executor import DeviceExecutor
from dflash_trt.backends.onnxruntime.caches import LinearCaches, PagedCaches
from dflash_trt.backends.onnxruntime.executor import OnnxRuntimeExecutor
from dflash_trt.decoding import Generator
from dflash_trt.decoding.pacers import Pacer
from dflash_trt.decoding.page_group import PageAllocator
from dflash_trt.decoding.worker import GeneratorWorker
from dflash_trt.serving.server.launcher import TritonServer
from dflash_trt.serving.server.supervisor import Service
from dflash_trt.text.chat import ChatRenderer
from dflash_trt.text.grammar import Follower


def cache_arrays(caches: LinearCaches) -> dict[str, FloatArray]:
    """The caches themselves, [slots, kv heads, M, D] by name."""
    return caches._arrays


def arrays(executor: Executor) -> dict[str, FloatArray]:
    """An executor's linear caches, [slots, kv heads, M, D] by name."""
    assert isinstance(executor, OnnxRuntimeExecutor)
    assert isinstance(executor.caches, LinearCaches)
    return cache_arrays(executor.caches)


def cache_length(executor: OnnxRuntimeExecutor) -> int:
    """Positions that its linear caches are allocated for."""
    assert isinstance(executor.caches, LinearCaches)
    return executor.caches.length


def pools(executor: Executor) -> dict[str, FloatArray]:
    """An executor's pools, [pages, ...] by name."""
    assert isinstance(executor, OnnxRuntimeExecutor)
    assert isinstance(executor.caches, PagedCaches)
    return executor.caches._pools


def allocator(generator: Generator, window: int | None = None) -> PageAllocator:
    """Who holds which page of the layers of `window`."""
    assert generator._paging is not None
    groups = {group._window: group for group in generator._paging._groups}
    return groups[window].allocator


def shareable_keys(generator: Generator) -> list[bytes]:
    """Keys of the pages that others can share, of layers without a window."""
    return [*allocator(generator)._page_of]


def held_pages(generator: Generator, window: int | None = None) -> int:
    """Pages of the layers of `window` that requests hold."""
    return allocator(generator, window).held


def idle_pages(pages: PageAllocator) -> int:
    """Pages that nobody holds and that a key may still find."""
    return len(pages._idle)


def paged_requests(generator: Generator) -> set[int]:
    """Requests whose pages are known, waiting ones too."""
    assert generator._paging is not None
    return set(generator._paging._sequences)


def free_pages(generator: Generator, window: int | None = None) -> list[int]:
    """Pages that no request holds and no prefix keeps."""
    pages = allocator(generator, window)
    known = {*pages._holders, *pages._key_of}
    return [page for page in range(pages._count) if page not in known]


def factors(pacer: Pacer) -> list[float]:
    """Live acceptance by draft position, as a share of what was measured."""
    return list(pacer._factors)


def poison_free_pages(
    generator: Generator, pools: dict[str, FloatArray], window: int | None = None
) -> None:
    """NaN in every row of every page that nobody may read, of the layers of `window`."""
    free = free_pages(generator, window)
    for pool in pools.values():
        pool[free] = np.nan


def poison_all_free_pages(generator: Generator, executor: Executor) -> None:
    """NaN in every row of every page that nobody may read, of all layers."""
    assert isinstance(executor, OnnxRuntimeExecutor)
    assert isinstance(executor.caches, PagedCaches)
    for name, pool in pools(executor).items():
        poison_free_pages(generator, {name: pool}, executor.caches._windows[name])


def loaded_graphs(executor: Executor) -> set[str]:
    """Names of the graphs that have a session."""
    assert isinstance(executor, OnnxRuntimeExecutor)
    return set(executor._sessions)


def count_calls(executor: OnnxRuntimeExecutor) -> dict[str, Mock]:
    """Replaces the executor's sessions by ones that count calls."""
    for graph in ("target", "draft", "target_only"):
        executor._sessions[graph] = Mock(wraps=executor._session(graph))
    return executor._sessions


def binding_count(executor: OnnxRuntimeExecutor) -> int:
    """Calls whose tensors are bound, kept for the next of their shape."""
    return len(executor._bindings)


def read_graphs_of(executor: OnnxRuntimeExecutor, folder: Path) -> None:
    """From now on it opens the graphs of another bundle."""
    executor._folder = folder


def has_read_scores(executor: DeviceExecutor) -> bool:
    """Whether whole rows of logits came to the host."""
    return executor._whole_rows is not None


def has_failed(worker: GeneratorWorker) -> bool:
    """Whether its executor failed and no other opened."""
    return worker._broken is not None


def is_closing(worker: GeneratorWorker) -> bool:
    """Whether it has been told to close."""
    return worker._closing


def chat_worker(renderer: ChatRenderer) -> subprocess.Popen[bytes]:
    """The process that renders chat templates."""
    (worker,) = renderer._sandbox._workers
    return worker


def is_stopping(service: Service) -> bool:
    """Whether it has heard of a signal."""
    return service._stopping.is_set()


def server_traces(server: TritonServer) -> list[Path]:
    """Folder and shared memory that a server has for itself."""
    return [server._folder, *Path("/dev/shm").glob(f"{server._folder.name}*")]


def allows_all(follower: Follower, token_ids: Iterable[int]) -> bool:
    """Whether these tokens may come, one after the other."""
    one = follower.fork()
    for token_id in token_ids:
        if not one.allows(token_id):
            return False
        one.take(token_id)
    return True


def count_functions(room: str, act: Callable[[], object]) -> int:
    """How often functions of a room are entered while `act` runs."""
    entered, before = 0, sys.getprofile()

    def note(frame: FrameType, event: str, _: object) -> None:
        nonlocal entered
        entered += event == "call" and f"/dflash_trt/{room}/" in frame.f_code.co_filename

    sys.setprofile(note)
    try:
        act()
    finally:
        sys.setprofile(before)
    return entered

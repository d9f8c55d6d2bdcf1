"""Engine files to execution contexts, for TensorRT-RTX and TensorRT alike."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

from dflash_trt.backends.tensorrt.build.profiles import Profile
from dflash_trt.backends.tensorrt.library import Library, make_logger
from dflash_trt.core.user_cache import read_cache, write_cache
from dflash_trt.errors import DflashError, one_line
from dflash_trt.graph.bindings import GraphName

REBUILD = "build the bundle again; `dflash-trt inspect --verify` says whether its files are whole"


class Loader:
    """Deserialises engines and makes their contexts; keeps the library's own messages.

    Args:
        library: which of the two.
        trt: its module.
        kernel_cache: where TensorRT-RTX keeps the kernels that it compiles for shapes as they
            come up, so that the next process need not; None keeps none.
    """

    def __init__(self, library: Library, trt: Any, kernel_cache: Path | None) -> None:
        self._library = library
        self._trt = trt
        self._logger = make_logger(trt)
        self._runtime = trt.Runtime(self._logger)
        self._cache_path = kernel_cache
        self._cache: Any = None
        self._cache_data = b""

    def load(self, path: Path) -> Any:
        """The engine in the file at `path`, on the device.

        Raises:
            DflashError: it is not an engine, or not one for this library and device.
        """
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            if self._library.is_rtx:
                self._check_header(path, data[: self._runtime.engine_header_size])
            engine = self._runtime.deserialize_cuda_engine(data)
        if engine is None:
            raise self.failure("load it", path.name, fix=REBUILD)
        return engine

    def make_context(
        self, engine: Any, graph: GraphName, index: int, profile: Profile, stream: int
    ) -> Any:
        """A context of `engine` for its profile `index`; its memory is yet to be given.

        Raises:
            DflashError: the library refuses.
        """
        context = engine.create_execution_context(self._context_options(engine, profile))
        if context is None or not context.set_optimization_profile_async(index, stream):
            raise self.failure(f"make a context for {profile.name}", f"{graph}.engine")
        return context

    def failure(self, doing: str, where: str, *, fix: str | None = None) -> DflashError:
        """An error with what the library last said about it."""
        said, self._logger.errors[:] = list(self._logger.errors), []
        cause = one_line(said[0]) if said else "it gives no reason"
        return DflashError(f"{self._library.name} cannot {doing}: {cause}", where=where, fix=fix)

    def save_kernels(self) -> None:
        """Writes the kernel cache, if anything was compiled since it was read."""
        if self._cache is None or self._cache_path is None:
            return
        kernels = self._cache.serialize()
        if kernels is not None and bytes(kernels) != self._cache_data:
            write_cache(self._cache_path, bytes(kernels))

    def _context_options(self, engine: Any, profile: Profile) -> Any:
        """Memory comes from the caller: engines run in turn and share it.

        TensorRT-RTX compiles kernels for the shapes of a call. Decode steps have few and are
        captured after their second run, so they wait for the compiler; chunks have many, and run
        on general kernels meanwhile.
        """
        trt = self._trt
        user_managed = trt.ExecutionContextAllocationStrategy.USER_MANAGED
        if not self._library.is_rtx:
            return user_managed
        config = engine.create_runtime_config()
        config.set_execution_context_allocation_strategy(user_managed)
        strategies = trt.DynamicShapesKernelSpecializationStrategy
        is_decode = profile.name == "decode"
        config.dynamic_shapes_kernel_specialization_strategy = (
            strategies.EAGER if is_decode else strategies.LAZY
        )
        if self._cache_path is not None:
            if self._cache is None:
                self._cache = config.create_runtime_cache()
                # A cache of another GPU, driver or version is refused, and grows anew.
                data = read_cache(self._cache_path)
                if data and self._cache.deserialize(data):
                    self._cache_data = data
            config.set_runtime_cache(self._cache)
        return config

    def _check_header(self, path: Path, header: bytes) -> None:
        validity, diagnostics = self._runtime.get_engine_validity(header)
        if validity != self._trt.EngineValidity.INVALID:
            return
        kinds = self._trt.EngineInvalidityDiagnostics.__members__.values()
        reasons = [
            str(kind.name).lower().replace("_", " ") for kind in kinds if int(kind) & diagnostics
        ]
        raise DflashError(
            f"{self._library.name} does not accept it: {', '.join(reasons) or 'no reason given'}",
            where=path,
            fix=REBUILD,
        )

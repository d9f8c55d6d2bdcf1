"""A bundle's engines: held to the manifest when they are loaded, then run pass by pass.

One code for TensorRT-RTX and TensorRT.
"""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

from onnx import TensorProto

from dflash_trt.backends.device.passes import Pass, PassBundle
from dflash_trt.backends.tensorrt.build.profiles import Profile, choose_profile, profiles
from dflash_trt.backends.tensorrt.library import Library, RefusedError, make_logger
from dflash_trt.core.files import open_file
from dflash_trt.core.user_cache import read_cache, write_cache
from dflash_trt.errors import DflashError
from dflash_trt.graph.bindings import GraphName

TYPE_NAMES: dict[int, str] = {
    TensorProto.INT32: "INT32",
    TensorProto.INT64: "INT64",
    TensorProto.FLOAT: "FLOAT",
    TensorProto.FLOAT16: "HALF",
    TensorProto.BFLOAT16: "BF16",
    TensorProto.FLOAT8E4M3FN: "FP8",
}
"""TensorRT's name of each element type in ONNX."""

REBUILD = "build the bundle again; `dflash-trt inspect --verify` says whether its files are whole"


def check_engine(bundle: PassBundle, graph: GraphName, native: Any, profile_count: int) -> None:
    """Refuses an engine that is not what the manifest describes: binding would write past it.

    TensorRT says where it updates a cache itself, and nothing (None) of what plugins update:
    of these only the GPU check can tell that it is in place.

    Raises:
        DflashError: names the first thing that differs.
    """

    def refuse(what: str) -> None:
        what = f"is not the engine that the manifest describes: {what}"
        raise DflashError(what, where=f"{graph}.engine", fix="build the bundle again")

    tensors = {tensor.name: tensor for tensor in bundle.tensors(graph)}
    names = {str(native.get_tensor_name(index)) for index in range(native.num_io_tensors)}
    if names != tensors.keys():
        refuse(f"its tensors differ in {', '.join(sorted(names ^ tensors.keys()))}")
    for name, tensor in tensors.items():
        shape, wanted = list(native.get_tensor_shape(name)), list(tensor.sized({}))
        if shape != wanted:
            refuse(f"{name} has shape {shape}, the manifest says {wanted}")
        found, expected = native.get_tensor_dtype(name).name, TYPE_NAMES[tensor.element_type]
        if found != expected:
            refuse(f"{name} is {found}, the manifest says {expected}")
        if tensor.updates:
            told = native.get_aliased_input_tensor(name)
            is_untold = told is None and tensor.updates in bundle.plugin_caches[graph]
            if told != tensor.updates and not is_untold:
                refuse(f"{tensor.updates} is not updated in place")
    if (built := native.num_optimization_profiles) != profile_count:
        refuse(f"it has {built} profiles, not {profile_count}")


class Loader:
    """Deserialises engines and makes their contexts; keeps the library's own messages.

    Args:
        library: which of the two.
        trt: its module.
        kernel_cache: where TensorRT-RTX keeps the kernels that it compiles for shapes as they
            come up, so that the next process need not; None keeps none.
    """

    def __init__(self, library: Library, trt: Any, kernel_cache: Path | None) -> None:
        self.library = library
        self._trt = trt
        self._logger = make_logger(trt)
        self._runtime = trt.Runtime(self._logger)
        self._cache_path = kernel_cache
        self._cache: Any = None
        self._cache_data = b""

    def load(self, bundle: PassBundle, graph: GraphName) -> tuple[Any, int]:
        """The engine of a graph, on the device, and the bytes that its contexts compute in.

        Raises:
            DflashError: it is not an engine, or not one for this library and device.
        """
        native = self.read(bundle.paths[graph])
        count = len(profiles(graph, bundle.limits, self.library))
        check_engine(bundle, graph, native, count)
        each = map(native.get_device_memory_size_for_profile_v2, range(count))
        return native, max(map(int, each))

    def read(self, path: Path) -> Any:
        """The engine in the file at `path`; DflashError as `load` raises it."""
        with open_file(path) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            engine = self._runtime.deserialize_cuda_engine(data)
        if engine is None:
            raise self.failure("load it", path.name, fix=REBUILD)
        return engine

    def make_context(
        self, bundle: PassBundle, part: Pass, loaded: Any, stream: int
    ) -> EngineContext:
        """A context of the profile that `part` fits best; its memory is yet to be given.

        Raises:
            DflashError: the library refuses.
            ValueError: no profile takes the size of `part`.
        """
        graph, known = part.graph, profiles(part.graph, bundle.limits, self.library)
        index = choose_profile(known, part.axes)
        if index is None:
            raise ValueError(f"the {graph} engine takes no call of {dict(part.axes)}")
        context = loaded.create_execution_context(self._context_options(loaded, known[index]))
        if context is None or not context.set_optimization_profile_async(index, stream):
            raise self.failure(f"make a context for {known[index].name}", f"{graph}.engine")
        return EngineContext(graph, context, self, stream)

    def failure(self, doing: str, where: str, *, fix: str | None = None) -> DflashError:
        """An error with what the library last said about it."""
        said, self._logger.errors[:] = list(self._logger.errors), []
        return RefusedError(self.library, doing, where, said, fix=fix)

    def save_kernels(self) -> None:
        """Writes the kernel cache, if anything was compiled since it was read."""
        if self._cache is None or self._cache_path is None:
            return
        kernels = self._cache.serialize()
        if kernels is not None and bytes(kernels) != self._cache_data:
            write_cache(self._cache_path, bytes(kernels))

    def _context_options(self, engine: Any, profile: Profile) -> Any:
        """Memory comes from the caller: engines run in turn and share it.

        Decode steps are captured, so they wait for TensorRT-RTX's compiler; chunks run on general
        kernels meanwhile.
        """
        trt = self._trt
        user_managed = trt.ExecutionContextAllocationStrategy.USER_MANAGED
        if not self.library.is_rtx:
            return user_managed
        config = engine.create_runtime_config()
        config.set_execution_context_allocation_strategy(user_managed)
        strategies = trt.DynamicShapesKernelSpecializationStrategy
        config.dynamic_shapes_kernel_specialization_strategy = (
            strategies.EAGER if profile.is_step else strategies.LAZY
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


class EngineContext:
    """An execution context: shapes and addresses are set when a pass is not the one before."""

    def __init__(self, graph: GraphName, native: Any, loader: Loader, stream: int) -> None:
        self._graph = graph
        self._native = native
        self._loader = loader
        self._stream = stream
        self._bound: Pass | None = None

    def use_scratch(self, address: int, size: int) -> None:
        """Gives the context the memory that it computes in."""
        self._native.set_device_memory(address, size)

    def enqueue(self, part: Pass) -> None:
        """Puts one run into the stream.

        Raises:
            DflashError: the library refuses a shape, an address or the run.
        """
        if self._bound is not part:
            shapes = {} if self._bound is None else self._bound.shapes
            self._bound = None
            for name, shape in part.shapes.items():
                if shapes.get(name) != shape and not self._native.set_input_shape(name, shape):
                    raise self._failure(f"take {name} of shape {list(shape)}")
            for name, address in part.addresses.items():
                if not self._native.set_tensor_address(name, address):
                    raise self._failure(f"bind {name}")
            self._bound = part
        if not self._native.execute_async_v3(self._stream):
            raise self._failure("run")

    def _failure(self, doing: str) -> DflashError:
        return self._loader.failure(doing, f"{self._graph}.engine")

"""Registers the operations with TensorRT as ahead-of-time plugins.

`tensorrt.plugin` learns a plugin's tensors and attributes from the annotated signatures of Python
functions. They are made here from the `Operation`. An engine embeds the kernels' code and the
expressions of the launch, so it needs neither Python nor this package when it runs. The code is a
cubin, which no driver compiles again, or PTX where TensorRT takes no cubin.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from types import GenericAlias, SimpleNamespace
from typing import Any

import numpy.typing  # noqa: F401 - tensorrt.plugin 11.4 uses it without importing it

from dflash_plugins.compile import CompiledKernel, compile_kernel
from dflash_plugins.operation import (
    VERSION,
    Attributes,
    DType,
    KernelCode,
    Operation,
    Specs,
    TensorSpec,
    kernel_spec,
)
from dflash_plugins.table import load_kernel, operations
from dflash_trt.core.user_cache import user_cache_file
from dflash_trt.errors import DflashError

# Names of element types in TensorRT's AutoTuneCombination, where they differ from its DataType's.
_SHORT_NAMES = {DType.FLOAT32: "FP32", DType.FLOAT16: "FP16"}

Compiler = Callable[..., CompiledKernel]


class PluginRegistration:
    """Registers all operations with one TensorRT module, which takes each only once.

    Args:
        tensorrt: the module.
        plugin: `tensorrt.plugin`, which takes the registrations.
        arch: the architecture to compile for, such as "sm_100a".
        folder: where compiled kernels are kept; None is the user's cache folder.

    `arch` and `code` may be set anew between builds: the next one gets such kernels.
    """

    def __init__(
        self,
        tensorrt: Any,
        plugin: Any,
        arch: str,
        folder: Path | None = None,
        compiler: Compiler = compile_kernel,
    ) -> None:
        self._tensorrt, self._plugin = tensorrt, plugin
        self.arch, self._folder = arch, folder or user_cache_file("kernels")
        self.code: KernelCode = "cubin"
        self._compile = compiler
        self._types = {getattr(tensorrt.DataType, one.tensorrt_name): one for one in DType}
        self._failure: Exception | None = None

    def raise_failure(self) -> None:
        """Raises the first exception of a callback since the last call, if there was one.

        TensorRT prints what a callback raises to stderr and goes on with an error code.
        """
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def register(self) -> None:
        """Registers every operation that TensorRT does not know yet."""
        for operation in operations().values():
            namespace, _, name = operation.plugin_id.partition("::")
            if hasattr(getattr(self._plugin.op, namespace, None), name):
                continue
            plugin, identifier = self._plugin, operation.plugin_id
            plugin.register(identifier)(self._describer(operation))
            plugin.autotune(identifier)(self._tuner(operation))
            plugin.aot_impl(identifier)(self._implementation(operation))
            self._identify_timings(operation)

    def _describer(self, operation: Operation) -> Any:
        def describe(*tensors: Any, **attributes: Any) -> Any:
            inputs = dict(zip(operation.inputs, tensors, strict=True))
            specs = {name: self._spec(one) for name, one in inputs.items()}
            own = operation.describe(specs, attributes)
            return tuple(
                inputs[operation.aliases[name]].aliased()
                if name in operation.aliases
                else self._describe_tensor(own[name])
                for name in operation.outputs
            )

        result = GenericAlias(tuple, (self._plugin.TensorDesc,) * len(operation.outputs))
        return self._signed(describe, operation, {}, result)

    def _tuner(self, operation: Operation) -> Any:
        def tune(*arguments: Any) -> Any:  # networks are strongly typed: one combination is enough
            tensors = [*arguments[: len(operation.inputs)], *arguments[-1]]
            types = ", ".join(self._type_name(tensor.dtype) for tensor in tensors)
            # Tactics are numbered from 1; 0 is TensorRT's default, where none are listed.
            count = operation.tactics
            tactics = list(range(1, count + 1)) if count > 1 else None
            return [self._plugin.AutoTuneCombination(types, "LINEAR", tactics)]

        extra = {"outputs": GenericAlias(tuple, self._plugin.TensorDesc)}
        result = GenericAlias(list, self._plugin.AutoTuneCombination)
        return self._signed(tune, operation, extra, result)

    def _implementation(self, operation: Operation) -> Any:
        def implement(*arguments: Any) -> Any:
            *values, _, tactic = arguments
            given = dict(zip((*operation.inputs, *operation.attributes), values, strict=True))
            inputs = {name: self._spec(given.pop(name)) for name in operation.inputs}
            return self._implement(operation, inputs, given, max(0, tactic - 1))

        plugin = self._plugin
        extra = {"outputs": GenericAlias(tuple, plugin.TensorDesc), "tactic": int}
        result = GenericAlias(tuple, (str, bytes, plugin.KernelLaunchParams, plugin.SymIntExprs))
        return self._signed(implement, operation, extra, result)

    def _implement(
        self, operation: Operation, inputs: Specs, attributes: Attributes, tactic: int
    ) -> tuple[str, bytes, Any, Any]:
        launch = operation.launch(inputs, attributes, tactic)
        tensors = {**inputs, **operation.output_specs(inputs, attributes)}
        kernel = self._compile(kernel_spec(operation, tensors, launch), self.arch, self._folder)
        params = self._plugin.KernelLaunchParams()
        params.grid_x, params.grid_y, params.grid_z = launch.grid
        params.block_x = kernel.threads
        params.shared_mem = kernel.shared_bytes
        extras = self._plugin.SymIntExprs(len(launch.extras))
        for index, extent in enumerate(launch.extras):
            extras[index] = self._plugin.SymInt32(extent)
        code = kernel.cubin if self.code == "cubin" else kernel.ptx.encode()
        return kernel.name, code, params, extras

    def _identify_timings(self, operation: Operation) -> None:
        """Has TensorRT keep apart what it measures of plugins that differ by more than tensors.

        The layer gives all plugins an empty timing cache ID, which TensorRT adds to their types and
        shapes: attention within a window would get the time, and the tactic, of one without.
        """
        namespace, _, name = operation.plugin_id.partition("::")
        creator = self._tensorrt.get_plugin_registry().get_creator(name, VERSION, namespace)
        create = creator.create_plugin

        def create_identified(name: str, namespace: str, fields: Any, *others: Any) -> Any:
            # Scalars: 11.1 makes numbers of the fields' arrays, which NumPy refuses from 2.4 on.
            given = [SimpleNamespace(name=one.name, data=one.data[0]) for one in fields]
            made = create(name, namespace, given, *others)
            # The kernel's source too: a file of timings may be older.
            words = [f"{one.name}={one.data}" for one in given]
            words += [operation.plugin_id, load_kernel(operation.kernel).cache_key]
            made.get_timing_cache_id = lambda: " ".join(words)
            return made

        creator.create_plugin = create_identified

    def _signed(
        self, function: Any, operation: Operation, extra: dict[str, Any], result: Any
    ) -> Any:
        """`function` with the signature of `operation`, which TensorRT reads."""
        kinds = dict.fromkeys(operation.inputs, self._plugin.TensorDesc)
        kinds |= {**operation.attributes, **extra}
        either = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters = [inspect.Parameter(n, either, annotation=kind) for n, kind in kinds.items()]

        def callback(*arguments: Any, **named: Any) -> Any:
            try:
                return function(*arguments, **named)
            except Exception as error:
                self._failure = self._failure or error
                raise

        callback.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            parameters, return_annotation=result
        )
        return callback

    def _spec(self, tensor: Any) -> TensorSpec:
        """A TensorSpec of TensorRT's TensorDesc.

        Its extents are expressions, those that the engine fixes as well: an integer cannot stand on
        the left of one.
        """
        return TensorSpec(self._dtype(tensor.dtype), tuple(tensor.shape_expr))

    def _describe_tensor(self, spec: TensorSpec) -> Any:
        dtype = getattr(self._tensorrt.DataType, spec.dtype.tensorrt_name)
        return self._plugin.from_shape_expr(spec.shape, dtype)

    def _dtype(self, dtype: Any) -> DType:
        if dtype not in self._types:
            raise DflashError(f"no kernel reads tensors of {dtype}")
        return self._types[dtype]

    def _type_name(self, dtype: Any) -> str:
        known = self._dtype(dtype)
        return _SHORT_NAMES.get(known, known.tensorrt_name)

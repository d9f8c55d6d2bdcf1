"""This project's plugins in TensorRT: registered, and which of a graph's calls are theirs.

Nothing here has run on a GPU: the registration is tested over NVIDIA's own Python layer.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import onnx
from dflash_plugins.operation import KernelCode

from dflash_trt.backends.kernel_calls import handed_over
from dflash_trt.backends.tensorrt.library import Library, OperationForm
from dflash_trt.errors import DflashError, one_line
from dflash_trt.graph.functions import TRT_DOMAIN
from dflash_trt.hardware.kernels import kernel_arch

if TYPE_CHECKING:
    from dflash_plugins.registration import PluginRegistration

_registrations: WeakKeyDictionary[Any, PluginRegistration] = WeakKeyDictionary()
"""By plugin module, which takes every operation only once."""


def plugin_arch(arch: str) -> str:
    """The architecture that kernels for `arch` ("sm_100") are compiled for here ("sm_100a").

    Raises:
        DflashError: Triton language is not installed, or there are no kernels for it.
    """
    from dflash_plugins.compile import check_compiler

    check_compiler()
    return kernel_arch(arch)


def register_plugins(library: Library, trt: Any, arch: str, code: KernelCode) -> set[str]:
    """Has TensorRT know every plugin, with kernels for `arch` as `code`; returns their names.

    Raises:
        DflashError: this TensorRT has no plugins of its own kind, or Triton language is missing.
    """
    from dflash_plugins.registration import PluginRegistration
    from dflash_plugins.table import operations

    try:
        plugin = importlib.import_module(f"{library.module}.plugin")
    except ImportError as error:
        raise DflashError(
            f"{library.name} does not load its plugin module: {one_line(error)}",
            where="--plugins",
        ) from error
    known = _registrations.get(plugin)
    if known is None:
        known = _registrations[plugin] = PluginRegistration(trt, plugin, plugin_arch(arch))
        known.register()
    known.arch, known.code = plugin_arch(arch), code
    return set(operations())


def raise_callback_failure() -> None:
    """Raises what a plugin's callback raised inside TensorRT, which keeps it to itself."""
    for registration in list(_registrations.values()):
        registration.raise_failure()


def operation_forms(handed: onnx.ModelProto, plugins: Collection[str]) -> dict[str, OperationForm]:
    """How TensorRT gets each operation of a model handed over, by name with its overload."""
    forms: dict[str, OperationForm] = {name: "plugin" for _, name in handed_over(handed, plugins)}
    for function in handed.functions:
        name = f"{function.name}_{function.overload}" if function.overload else function.name
        forms[name] = "native" if function.domain == TRT_DOMAIN else "function"
    return dict(sorted(forms.items()))


def plugin_caches(model: onnx.ModelProto, plugins: Collection[str]) -> list[str]:
    """The caches of `model` that plugins update in place, by input name.

    Raises:
        DflashError: one of them writes a cache's output that is not in the memory of its input.
    """
    from dflash_plugins.table import operations

    known, found = operations(), []
    caches = {f"{value.name}_out": value.name for value in model.graph.input}
    for node, name in handed_over(model, plugins):
        given = dict(zip(known[name].inputs, filter(None, node.input), strict=False))
        aliased = [given.get(known[name].aliases.get(one, "")) for one in known[name].outputs]
        for alias, output in zip(aliased, node.output, strict=False):
            if output not in caches:
                continue
            if alias != caches[output]:
                raise DflashError(f"{name} would not update {caches[output]} in place")
            found.append(alias)
    return found

"""Opens a bundle whose graphs PyTorch runs: on the GPU that is here, or else on the CPU."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

from dflash_trt.backends.base import ExecutorLimits
from dflash_trt.backends.device.executor import DeviceExecutor
from dflash_trt.backends.device.passes import PassBundle
from dflash_trt.backends.torch.host import HostCuda
from dflash_trt.backends.torch.passes import CudaPlace, HostPlace, TorchLoader, TorchPlace
from dflash_trt.errors import DflashError
from dflash_trt.graph.bindings import GRAPH_NAMES, GraphName
from dflash_trt.graph.form import GraphForm
from dflash_trt.graph.tensors import CacheLayout
from dflash_trt.hardware.device import Device

OLDEST_CAPABILITY = (8, 0)


def open_place(*, has_kernels: bool = False) -> tuple[Device, TorchPlace]:
    """The device that programs run on here, and where they lie on it.

    Raises:
        DflashError: the GPU is too old, or its kernels cannot be compiled.
    """
    if not torch.cuda.is_available():
        host = HostCuda()
        return Device(host), HostPlace(host)
    device = Device()
    capability = torch.cuda.get_device_capability(0)
    try:
        if capability < OLDEST_CAPABILITY:
            raise DflashError(
                f"{device.name} has compute capability {capability[0]}.{capability[1]}; PyTorch's "
                "executor needs 8.0 or newer",
                fix="build with --executor cpu",
            )
        if has_kernels:
            from dflash_plugins.compile import check_compiler

            check_compiler()
    except DflashError:
        device.close()
        raise
    torch.backends.cuda.matmul.allow_tf32 = False
    return device, CudaPlace()


def open_programs(
    folder: Path,
    form: GraphForm,
    limits: ExecutorLimits,
    layout: CacheLayout,
    graphs: Iterable[GraphName],
    threads: int | None,
) -> DeviceExecutor:
    """The executor of the graphs in `folder`, of `form`, with those of `graphs` loaded.

    Raises:
        DflashError: see open_place; or a graph is damaged or unlike its manifest, or there is no
            room.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    device, place = open_place(has_kernels=form.has_kernels)
    has_kernels = form.has_kernels and place.device.type == "cuda"
    paths = {graph: folder / f"{graph}.onnx" for graph in GRAPH_NAMES}
    try:
        loader = TorchLoader(place, has_kernels=has_kernels)
        executor = DeviceExecutor(PassBundle(paths, {}, limits, layout, form), device, loader)
        executor.preload(graphs)
    except BaseException:
        device.close()
        raise
    return executor

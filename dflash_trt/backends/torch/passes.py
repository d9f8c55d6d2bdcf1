"""PyTorch as a library of passes: graphs loaded as programs, run over a device's addresses."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from dflash_plugins.operation import DType, TensorSpec
from dflash_plugins.table import load_kernel, operations
from torch import Tensor

from dflash_trt.backends.device.passes import Pass, PassBundle
from dflash_trt.backends.kernel_calls import hand_over, hand_over_attention
from dflash_trt.backends.torch.host import HostCuda
from dflash_trt.backends.torch.program import Kept, Node, Program
from dflash_trt.backends.torch.weights import CHECK_IT, TYPES, Weights, read_model
from dflash_trt.core.files import FileKind, find_file
from dflash_trt.errors import DflashError, one_line
from dflash_trt.graph.bindings import GraphName
from dflash_trt.graph.ending import check_ending

KINDS = {
    torch.float32: DType.FLOAT32,
    torch.float16: DType.FLOAT16,
    torch.bfloat16: DType.BFLOAT16,
    torch.float8_e4m3fn: DType.FLOAT8,
    torch.int32: DType.INT32,
    torch.int64: DType.INT64,
}


class HostPlace:
    """This process's memory."""

    device = torch.device("cpu")

    def __init__(self, host: HostCuda) -> None:
        self._host = host

    def view(self, address: int, shape: tuple[int, ...], kind: torch.dtype) -> Tensor:
        """The tensor that lies at an address."""
        size = math.prod(shape) * kind.itemsize
        raw = (ctypes.c_uint8 * size).from_address(address)
        return torch.frombuffer(raw, dtype=kind).reshape(shape)

    def new_pool(self) -> None:
        """Memory of a context's own, which what is captured goes on using: none is needed."""

    def submit(self, stream: int, pool: Any, work: Callable[[], None]) -> None:
        """Enqueues what `work` enqueues, in `stream`."""
        self._host.submit(work)


class CudaPlace:
    """Memory of a CUDA device, in whose stream PyTorch enqueues. Never run on one yet."""

    device = torch.device("cuda", 0)

    def view(self, address: int, shape: tuple[int, ...], kind: torch.dtype) -> Tensor:
        size = math.prod(shape) * kind.itemsize
        place = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}
        holder = SimpleNamespace(__cuda_array_interface__={**place, "strides": None})
        return torch.as_tensor(holder, device=self.device).view(kind).reshape(shape)

    def new_pool(self) -> Any:
        return torch.cuda.MemPool()

    def submit(self, stream: int, pool: Any, work: Callable[[], None]) -> None:
        own = torch.cuda.ExternalStream(stream, self.device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(own), torch.cuda.use_mem_pool(pool):
            work()


TorchPlace = HostPlace | CudaPlace
"""Where programs run: this machine's memory, or a GPU."""


class TorchLoader:
    """Loads graphs as programs, whose weights lie in the folder of their files.

    Args:
        place: where they run.
        has_kernels: whether this project's kernels, in Triton language, run the functions that
            they are written for; else the functions' bodies run.
    """

    def __init__(self, place: TorchPlace, *, has_kernels: bool) -> None:
        self._place = place
        self._kernels = operations() if has_kernels else {}
        self._weights: Weights | None = None

    def load(self, bundle: PassBundle, graph: GraphName) -> tuple[Program, int]:
        path = bundle.paths[graph]
        model = read_model(find_file(path, FileKind.GRAPH).read_bytes(), path.name)
        check_ending(model, path)
        if self._kernels:
            assert bundle.form.cache_length is not None
            sizes = bundle.limits.block_size, bundle.form.cache_length
            model = hand_over(model, self._kernels)
            hand_over_attention(model, *sizes)
        if self._weights is None:
            self._weights = Weights(path.parent, self._place.device)
        try:
            program = Program(model, self._weights, self._kernels, self._launch)
        except DflashError:
            raise
        except Exception as error:  # PyTorch has no memory, or the graph's constants no sense
            what = f"PyTorch cannot load it: {one_line(error)}"
            raise DflashError(
                what, where=path.name, fix="use a smaller pair, or " + CHECK_IT
            ) from error
        wanted = {one.name: (one.element_type, one.shape) for one in bundle.tensors(graph)}
        found = program.inputs | program.outputs
        if differing := {name for name, _ in wanted.items() ^ found.items()}:
            raise DflashError(
                f"its {', '.join(sorted(differing))[:200]} are not as the manifest describes them",
                where=path.name,
                fix="build the bundle again",
            )
        return program, 0

    def make_context(
        self, bundle: PassBundle, part: Pass, loaded: Any, stream: int
    ) -> TorchContext:
        return TorchContext(loaded, self._place, stream)

    def save_kernels(self) -> None:
        """Triton language keeps its own."""

    def _launch(self, node: Node, tensors: list[Tensor]) -> list[Tensor]:
        """Starts the kernel of a node, as TensorRT's plugins would."""
        operation = self._kernels[node.operation]
        given = dict(zip(operation.inputs, tensors, strict=True))
        for name, tensor in given.items():
            if name not in operation.aliases.values():
                given[name] = tensor.contiguous()
        specs = {name: TensorSpec(KINDS[one.dtype], (*one.shape,)) for name, one in given.items()}
        attributes = {
            name: kind(node.attributes[name]) for name, kind in operation.attributes.items()
        }
        how, kinds = operation.launch(specs, attributes, 0), {v: k for k, v in KINDS.items()}
        made = {
            name: given[operation.aliases[name]]
            if name in operation.aliases
            else torch.empty((*spec.shape,), dtype=kinds[spec.dtype], device=self._place.device)
            for name, spec in operation.output_specs(specs, attributes).items()
        }
        if all(how.grid):
            arguments = {**given, **made, **dict(zip(operation.extras, how.extras, strict=True))}
            launched = {**arguments, **how.constants}
            kernel = load_kernel(operation.kernel)[how.grid]
            kernel(**launched, num_warps=how.warps, num_stages=how.stages)
        return [made[name] for name in operation.outputs]


class TorchContext:
    """A program over the addresses of one pass after another, all of one shape."""

    def __init__(self, program: Program, place: TorchPlace, stream: int) -> None:
        self._program, self._place, self._stream = program, place, stream
        self._pool, self._kept = place.new_pool(), Kept()
        self._bound: Pass | None = None
        self._views: dict[str, Tensor] = {}

    def use_scratch(self, address: int, size: int) -> None:
        """PyTorch has memory of its own."""

    def enqueue(self, part: Pass) -> None:
        if self._bound is not part:
            self._views = {
                name: self._place.view(part.addresses[name], shape, TYPES[kind])
                for name, shape in part.shapes.items()
                for kind in [self._program.inputs[name][0]]
            }
            self._bound = part
        views = self._views

        def work() -> None:
            with torch.inference_mode():
                results = self._program.run(views, self._kept)
                for name, value in results.items():
                    kind, address = TYPES[self._program.outputs[name][0]], part.addresses[name]
                    if value.data_ptr() != address or not value.is_contiguous():
                        shape = (*value.shape,)
                        self._place.view(address, shape, kind).copy_(value)

        self._place.submit(self._stream, self._pool, work)

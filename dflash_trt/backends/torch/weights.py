"""Weights of graphs: mapped from the shards that they lie in, held once for all graphs."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import TensorProto, numpy_helper
from torch import Tensor

from dflash_trt.core.files import find_file
from dflash_trt.errors import DflashError
from dflash_trt.quantization.codecs import decode_packed_e2m1

TYPES: dict[int, torch.dtype] = {
    TensorProto.FLOAT: torch.float32,
    TensorProto.FLOAT16: torch.float16,
    TensorProto.BFLOAT16: torch.bfloat16,
    TensorProto.DOUBLE: torch.float64,
    TensorProto.FLOAT8E4M3FN: torch.float8_e4m3fn,
    TensorProto.INT64: torch.int64,
    TensorProto.INT32: torch.int32,
    TensorProto.INT8: torch.int8,
    TensorProto.UINT8: torch.uint8,
    TensorProto.BOOL: torch.bool,
    # Words whose bits alone count: PyTorch multiplies and shifts none that are unsigned.
    TensorProto.UINT64: torch.int64,
}
"""PyTorch's type for each element type of ONNX that graphs have."""

CHECK_IT = "check the bundle with `dflash-trt inspect --verify`"
ON_HOST = 64
"""Elements of constants that stay on the host, where shapes are computed."""

Constant = tuple[str, Callable[[], Tensor]]
"""What tells a constant from others, and what makes it."""


class Weights:
    """Tensors on `device`, of files in `folder`; each is there once, whichever graphs read it."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        self._folder, self.device = folder, device
        self.has_scaled_products = has_scaled_products(device)
        self._files: dict[str, Tensor] = {}
        self._held: dict[str, Tensor] = {}

    def hold(self, constant: Constant) -> Tensor:
        """The constant's value, made at its first use."""
        key, make = constant
        if key not in self._held:
            self._held[key] = make()
        return self._held[key]

    def constant(self, tensor: TensorProto, graph: str) -> Constant:
        """What an initializer stands for; nothing is read yet.

        Raises:
            DflashError: its type is unknown, or its data do not lie in a file beside the graph.
        """
        is_fp4, dims = tensor.data_type == TensorProto.FLOAT4E2M1, tuple(tensor.dims)
        kind = torch.uint8 if is_fp4 else TYPES.get(tensor.data_type)
        if kind is None:
            what = f"{tensor.name} is {TensorProto.DataType.Name(tensor.data_type)}"
            raise DflashError(f"{what}, which nothing here reads", where=graph)
        if tensor.data_location != TensorProto.EXTERNAL:
            return f"{graph}:{tensor.name}", lambda: from_proto(tensor, self.device)
        place = {one.key: one.value for one in tensor.external_data}
        try:
            begin, size = int(place["offset"]), int(place["length"])
            data = self._file(place["location"])[begin:][:size]
            wanted = math.prod(dims) * kind.itemsize >> is_fp4
            if begin < 0 or not size == data.numel() == wanted:
                raise ValueError(size)
        except (KeyError, ValueError, OSError, RuntimeError) as error:
            what = f"{tensor.name} does not lie in a file of the bundle as it says"
            raise DflashError(what, where=graph, fix=CHECK_IT) from error

        def read() -> Tensor:
            bits = data if data.storage_offset() % kind.itemsize == 0 else data.clone()
            if is_fp4:
                codes = decode_packed_e2m1(bits.reshape(dims[0], -1).numpy())
                return torch.from_numpy(codes).to(torch.float8_e4m3fn).reshape(dims).to(self.device)
            return bits.view(kind).reshape(dims).to(self.device)

        return f"{place['location']}:{begin}:{size}:{kind}:{dims}:{is_fp4}", read

    def _file(self, name: str) -> Tensor:
        """The bytes of a file, mapped; nothing writes to it."""
        if name not in self._files:
            path = find_file(self._folder / name, within=self._folder)
            size, kind = path.stat().st_size, torch.uint8
            self._files[name] = torch.from_file(str(path), shared=False, size=size, dtype=kind)
        return self._files[name]


def has_scaled_products(device: torch.device) -> bool:
    """Whether the device multiplies FP8 codes; elsewhere what they stand for is multiplied."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def from_proto(tensor: TensorProto, device: torch.device) -> Tensor:
    """A tensor that stands in the graph itself: on the host where it is small."""
    array = np.frombuffer(numpy_helper.to_array(tensor).tobytes(), np.uint8)
    bits = torch.empty(len(array), dtype=torch.uint8)  # of nothing, NumPy's has no stride to view
    bits.numpy()[:] = array
    value = bits.view(TYPES[tensor.data_type]).reshape(tuple(tensor.dims))
    return value if value.numel() <= ON_HOST else value.to(device)


def read_model(data: bytes, where: str) -> onnx.ModelProto:
    """The graph in a file's bytes; DflashError where it is none."""
    try:
        return onnx.load_from_string(data)
    except Exception as error:  # protobuf's own class
        raise DflashError("is not a readable graph", where=where, fix=CHECK_IT) from error

"""Weights of graphs: mapped from the shards that they lie in, held once for all graphs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx
import torch
from onnx import TensorProto, numpy_helper
from torch import Tensor

from dflash_trt.core.files import resolved
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

ON_HOST = 64
"""Elements of constants that stay on the host, where shapes are computed."""

Constant = tuple[str, Callable[[], Tensor]]
"""What tells a constant from others, and what makes it."""


class Weights:
    """Tensors on `device`, of files in `folder`; each is there once, whichever graphs read it."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        self._folder, self.device = folder, device
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
        is_fp4 = tensor.data_type == TensorProto.FLOAT4E2M1
        if tensor.data_type not in TYPES and not is_fp4:
            kind = TensorProto.DataType.Name(tensor.data_type)
            raise DflashError(f"{tensor.name} is {kind}, which nothing here reads", where=graph)
        if tensor.data_location != TensorProto.EXTERNAL:
            return f"{graph}:{tensor.name}", lambda: self._read(tensor)
        place = {one.key: one.value for one in tensor.external_data}
        name, dims = place.get("location", ""), tuple(tensor.dims)
        try:
            begin, size = int(place["offset"]), int(place["length"])
            data = self._file(name)[begin : begin + size]
            is_whole = begin >= 0 and data.numel() == size
            if is_fp4:
                is_whole &= 2 * size == torch.Size(dims).numel()
            else:
                width = TYPES[tensor.data_type].itemsize
                is_whole &= size == torch.Size(dims).numel() * width
        except (KeyError, ValueError, OSError, RuntimeError):
            is_whole = False
        if not is_whole:
            raise DflashError(
                f"{tensor.name} does not lie in {name or 'a file'} as it says",
                where=graph,
                fix="check the bundle with `dflash-trt inspect --verify`",
            )

        def read() -> Tensor:
            if is_fp4:
                codes = torch.from_numpy(decode_packed_e2m1(data.reshape(dims[0], -1).numpy()))
                return codes.to(torch.float8_e4m3fn).reshape(dims).to(self.device)
            kind = TYPES[tensor.data_type]
            bits = data if data.storage_offset() % kind.itemsize == 0 else data.clone()
            return bits.view(kind).reshape(dims).to(self.device)

        return f"{name}:{begin}:{size}:{tensor.data_type}:{dims}", read

    def _file(self, name: str) -> Tensor:
        """The bytes of a file, mapped; nothing writes to it."""
        if name not in self._files:
            path = resolved(self._folder / name)
            if not name or not path.is_relative_to(resolved(self._folder)):
                raise ValueError(name)
            size = path.stat().st_size
            self._files[name] = torch.from_file(
                str(path), shared=False, size=size, dtype=torch.uint8
            )
        return self._files[name]

    def _read(self, tensor: TensorProto) -> Tensor:
        return from_proto(tensor, self.device)


def from_proto(tensor: TensorProto, device: torch.device) -> Tensor:
    """A tensor that stands in the graph itself: on the host where it is small."""
    kind, dims = TYPES[tensor.data_type], tuple(tensor.dims)
    if tensor.raw_data:
        value = torch.frombuffer(bytearray(tensor.raw_data), dtype=torch.uint8).view(kind)
    elif kind.itemsize < 4 and kind.is_floating_point:
        wide = numpy_helper.to_array(tensor).astype("float32")
        value = torch.from_numpy(wide).to(kind)
    else:
        array = numpy_helper.to_array(tensor).copy()
        value = torch.from_numpy(array.view("int64") if array.dtype == "uint64" else array)
    value = value.reshape(dims)
    return value if value.numel() <= ON_HOST else value.to(device)


def read_model(data: bytes, where: str) -> onnx.ModelProto:
    """The graph in a file's bytes; DflashError where it is none."""
    try:
        return onnx.load_from_string(data)
    except Exception as error:  # protobuf's own class
        raise DflashError(
            "is not a readable graph",
            where=where,
            fix="check the bundle with `dflash-trt inspect --verify`",
        ) from error

"""Operations of ONNX in PyTorch's words: those that this project's graphs have, and no more.

A function is given a node's tensors, and its attributes by their names. What it reads on the host
(shapes, axes, counts) comes as integers; all else is where the result is to be.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dflash_trt.backends.torch import fused
from dflash_trt.backends.torch.weights import TYPES
from dflash_trt.quantization.codecs import E4M3_MAX

Ints = Sequence[int]


@dataclass(frozen=True, slots=True)
class TorchOperation:
    """How an operation runs, and which of its arguments are read on the host.

    `updates`: it is also told whether to write where its first argument lies (`in_place`).
    """

    run: Callable[..., Any]
    host: Collection[int] = ()
    updates: bool = False


def cast(value: Tensor, kind: torch.dtype) -> Tensor:
    """`value` as another type; E4M3 saturates, as ONNX has it."""
    if kind is torch.float8_e4m3fn:
        value = value.float().clamp(-E4M3_MAX, E4M3_MAX)
    return value.to(kind)


def _divide(a: Tensor, b: Tensor) -> Tensor:
    return a / b if a.is_floating_point() else torch.div(a, b, rounding_mode="trunc")


def _reduce(function: Callable[..., Tensor]) -> TorchOperation:
    def run(x: Tensor, axes: Ints | None = None, keepdims: int = 1) -> Tensor:
        return function(x, dim=list(range(x.ndim) if axes is None else axes), keepdim=keepdims > 0)

    return TorchOperation(run, host=(1,))


def _arg(function: Callable[..., Tensor]) -> TorchOperation:
    def run(x: Tensor, axis: int = 0, keepdims: int = 1) -> Tensor:
        return function(x, dim=axis, keepdim=keepdims > 0)

    return TorchOperation(run)


def _fold(function: Callable[[Tensor, Tensor], Tensor]) -> TorchOperation:
    return TorchOperation(lambda *given: functools.reduce(function, given))


def _reshape(x: Tensor, shape: Ints) -> Tensor:
    return x.reshape([x.shape[at] if size == 0 else size for at, size in enumerate(shape)])


def _unsqueeze(x: Tensor, axes: Ints) -> Tensor:
    for axis in sorted(axis % (x.ndim + len(axes)) for axis in axes):
        x = x.unsqueeze(axis)
    return x


def _squeeze(x: Tensor, axes: Ints | None = None) -> Tensor:
    return x.squeeze() if axes is None else x.squeeze(tuple(axes))


def _slice(
    x: Tensor, starts: Ints, ends: Ints, axes: Ints | None = None, steps: Ints | None = None
) -> Tensor:
    index = [slice(None)] * x.ndim
    steps = [1] * len(starts) if steps is None else steps
    for axis, *bounds, step in zip(axes or range(len(starts)), starts, ends, steps, strict=True):
        size = x.shape[axis]
        start, end = (min(max(0, one + size if one < 0 else one), size) for one in bounds)
        index[axis] = slice(start, max(start, end), step)
    return x[tuple(index)]


def _gather(x: Tensor, index: Tensor, axis: int = 0) -> Tensor:
    axis, size = axis % x.ndim, x.shape[axis]
    if index.ndim == 0 and index.device.type == "cpu":
        return x.select(axis, int(index))
    index = torch.where(index < 0, index + size, index)
    bits = x.view(torch.uint8) if x.dtype is torch.float8_e4m3fn else x
    taken = bits.index_select(axis, index.reshape(-1)).view(x.dtype)
    return taken.reshape(*x.shape[:axis], *index.shape, *x.shape[axis + 1 :])


def _gather_nd(x: Tensor, index: Tensor, batch_dims: int = 0) -> Tensor:
    parts = list(index.unbind(-1))
    for axis in range(batch_dims):
        shape = [1] * parts[0].ndim
        shape[axis] = -1
        parts.insert(axis, torch.arange(x.shape[axis], device=index.device).reshape(shape))
    return x[tuple(parts)]


def _scatter_nd(
    x: Tensor, index: Tensor, rows: Tensor, in_place: bool, reduction: str = "none"
) -> Tensor:
    data, rows = x if in_place else x.clone(), cast(rows, x.dtype)
    return data.index_put_(index.unbind(-1), rows, accumulate=reduction == "add")


def _tensor_scatter(x: Tensor, rows: Tensor, start: Tensor, in_place: bool, axis: int) -> Tensor:
    index = start[:, None] + torch.arange(rows.shape[axis], device=x.device)
    shape = [1] * x.ndim
    shape[0], shape[axis] = index.shape
    data, index = x if in_place else x.clone(), index.reshape(shape).expand(rows.shape)
    return data.scatter_(axis, index, cast(rows, x.dtype))


def _pad(
    x: Tensor,
    pads: Ints,
    fill: Sequence[float] = (0,),
    axes: Ints | None = None,
    mode: str = "constant",
) -> Tensor:
    half = len(pads) // 2
    for axis, before, after in zip(axes or range(x.ndim), pads, pads[half:], strict=False):
        if mode == "edge":
            last = x.shape[axis] - 1
            index = torch.arange(-before, last + 1 + after, device=x.device).clamp(0, last)
            x = x.index_select(axis, index)
        elif before or after:
            behind = [0, 0] * (x.ndim - 1 - axis % x.ndim)
            x = F.pad(x, [*behind, before, after], value=fill[0])
    return x


def _shape(x: Tensor, start: int = 0, end: int | None = None) -> Tensor:
    return torch.tensor(list(x.shape)[start:end], dtype=torch.int64)


def _constant(**given: Any) -> Tensor:
    ((name, value),) = given.items()
    if isinstance(value, Tensor):
        return value
    is_integer = name.startswith("value_int")
    return torch.tensor(value, dtype=torch.int64 if is_integer else torch.float32)


def _constant_of_shape(shape: Ints, value: Tensor | None = None) -> Tensor:
    fill = torch.zeros(()) if value is None else value.reshape(())
    return fill.expand(list(shape)).clone()


def _top_k(x: Tensor, count: Ints, axis: int = -1, largest: int = 1) -> tuple[Tensor, Tensor]:
    """Sorted, of equal ones the first first, which `torch.topk` does not promise."""
    order = x.sort(dim=axis, descending=largest > 0, stable=True)
    return order.values.narrow(axis, 0, *count), order.indices.narrow(axis, 0, *count)


def _bit_shift(x: Tensor, by: Tensor, direction: str) -> Tensor:
    """Of words without a sign, whatever PyTorch takes them for."""
    if direction == "LEFT":
        return x << by
    return (x >> by) & ~(torch.full((), -1, dtype=x.dtype, device=x.device) << (64 - by))


def _gemm(
    a: Tensor,
    b: Tensor,
    c: Tensor | None = None,
    transA: int = 0,  # noqa: N803
    transB: int = 0,  # noqa: N803
) -> Tensor:
    a, b = a.t() if transA else a, b.t() if transB else b
    return a @ b if c is None else torch.addmm(c, a, b)


def _cum_sum(x: Tensor, axis: Ints, exclusive: int = 0) -> Tensor:
    total = x.cumsum(*axis)
    return total - x if exclusive else total


def _dequantize(
    x: Tensor, scale: Tensor, output_dtype: int = 0, axis: int = 1, block_size: int = 0
) -> Tensor:
    steps = scale.float()
    if block_size:
        steps = steps.repeat_interleave(block_size, axis % x.ndim)
    return cast(x.float() * steps, TYPES[output_dtype] if output_dtype else scale.dtype)


def _scaled_gemm(
    codes: Tensor, weight: Tensor, scale: Tensor, step: Tensor, output_dtype: int
) -> Tensor:
    """codes [T,in] · weight [out,in]ᵀ of FP8, times both scales, as the device multiplies them."""
    kind = TYPES[output_dtype]
    return torch._scaled_mm(codes, weight.t(), scale.float(), step.float(), out_dtype=kind)


_PLAIN = """
Neg neg  Abs abs  Exp exp  Log log  Sqrt sqrt  Sigmoid sigmoid  Tanh tanh  Round round  Not
logical_not  And logical_and  Or logical_or  Add add  Sub sub  Mul mul  Mod remainder  MatMul matmul
Equal eq  Less lt  LessOrEqual le  Greater gt  GreaterOrEqual ge  BitwiseAnd bitwise_and
BitwiseOr bitwise_or  BitwiseXor bitwise_xor  IsNaN isnan  Where where  Clip clamp
""".split()
"""Operations that PyTorch has as they are, each by both names."""

_OWN: Mapping[str, Callable[..., Any]] = {
    "Div": _divide,
    "Identity": lambda x: x,
    "BitShift": _bit_shift,
    "IsInf": lambda x, detect_negative=1: x.isinf() if detect_negative else x == torch.inf,
    "Gelu": F.gelu,
    "Softmax": lambda x, axis=-1: x.float().softmax(axis).to(x.dtype),
    "Cast": lambda x, to: cast(x, TYPES[to]),
    "CastLike": lambda x, like: cast(x, like.dtype),
    "QuantizeLinear": lambda x, scale, output_dtype: cast(
        x.float() / scale.float(), TYPES[output_dtype]
    ),
    "DequantizeLinear": _dequantize,
    "TRT_FP4DynamicQuantize": fused.quantize_fp4,
    "Concat": lambda *parts, axis: torch.cat(parts, axis),
    "Transpose": lambda x, perm: x.permute(perm),
    "Shape": _shape,
    "Size": lambda x: torch.tensor(x.numel()),
    "Constant": _constant,
    "Gather": _gather,
    "GatherElements": lambda x, index, axis=0: x.gather(axis, index),
    "GatherND": _gather_nd,
    "ScatterElements": lambda x, index, rows, axis=0: x.scatter(axis, index, rows),
    "NonZero": lambda x: x.nonzero().t(),
    "Unique": lambda x, sorted=1: x.unique(),
    "Gemm": _gemm,
    "ScaledGemm": _scaled_gemm,  # not ONNX's: program.py makes it of three of its nodes
    "RMSNormalization": fused.rms_norm,
    "RotaryEmbedding": fused.rotate,
    "Attention": fused.attend,
    "TRT_Attention": fused.attend_natively,
    "CausalConvWithState": fused.convolve,
    "LinearAttentionGate": fused.gate,
    "LinearAttention": fused.recur,
}

OPERATIONS: Mapping[str, TorchOperation] = {
    **{
        name: TorchOperation(getattr(torch, own))
        for name, own in zip(_PLAIN[::2], _PLAIN[1::2], strict=True)
    },
    **{name: TorchOperation(run) for name, run in _OWN.items()},
    "Min": _fold(torch.minimum),
    "Max": _fold(torch.maximum),
    "ReduceMax": _reduce(torch.amax),
    "ReduceSum": _reduce(torch.sum),
    "ReduceSumSquare": _reduce(lambda x, **how: torch.sum(x * x, **how)),
    "ArgMax": _arg(torch.argmax),
    "ArgMin": _arg(torch.argmin),
    "ScatterND": TorchOperation(_scatter_nd, updates=True),
    "TensorScatter": TorchOperation(_tensor_scatter, updates=True),
    "Reshape": TorchOperation(_reshape, host=(1,)),
    "Unsqueeze": TorchOperation(_unsqueeze, host=(1,)),
    "Squeeze": TorchOperation(_squeeze, host=(1,)),
    "Slice": TorchOperation(_slice, host=(1, 2, 3, 4)),
    "Expand": TorchOperation(
        lambda x, shape: x.expand(np.broadcast_shapes(tuple(x.shape), tuple(shape))), host=(1,)
    ),
    "Pad": TorchOperation(_pad, host=(1, 2, 3)),
    "Split": TorchOperation(lambda x, sizes, axis=0: x.split(sizes, axis), host=(1,)),
    "ConstantOfShape": TorchOperation(_constant_of_shape, host=(0,)),
    "Range": TorchOperation(lambda *bounds: torch.arange(*(n for (n,) in bounds)), host=(0, 1, 2)),
    "TopK": TorchOperation(_top_k, host=(1,)),
    "CumSum": TorchOperation(_cum_sum, host=(1,)),
}

"""Operations of ONNX in PyTorch's words: those that this project's graphs have, and no more.

Arguments at the `host` positions are shapes, axes and the like: their values are read, so they
stay on the host. All others are where the result is to be.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dflash_trt.backends.torch import fused
from dflash_trt.backends.torch.weights import TYPES

E4M3_MOST = 448.0


@dataclass(frozen=True, slots=True)
class Arguments:
    """What a node is given; absent tensors are None. `outputs` counts its results."""

    given: Sequence[Tensor | None]
    attributes: Mapping[str, Any]
    outputs: int = 1
    in_place: bool = False

    def __getitem__(self, at: int) -> Tensor:
        value = self.given[at]
        assert value is not None
        return value

    def has(self, at: int) -> bool:
        return at < len(self.given) and self.given[at] is not None

    def maybe(self, at: int) -> Tensor | None:
        return self.given[at] if at < len(self.given) else None

    def integers(self, at: int) -> list[int]:
        """The values of a tensor that is read; of one on the device this waits."""
        return [int(one) for one in self[at].reshape(-1).tolist()]

    def get(self, name: str, default: Any = None) -> Any:
        return self.attributes.get(name, default)


@dataclass(frozen=True, slots=True)
class Operation:
    """How an operation runs, and which of its arguments are read on the host."""

    run: Callable[[Arguments], Any]
    host: Collection[int] = ()


def _each(function: Callable[..., Tensor]) -> Operation:
    """An operation that takes its tensors as they come."""
    return Operation(lambda a: function(*a.given))


def _fold(function: Callable[[Tensor, Tensor], Tensor]) -> Operation:
    return Operation(lambda a: functools.reduce(function, [a[i] for i in range(len(a.given))]))


def _axes(a: Arguments, at: int = 1) -> list[int]:
    axes = a.integers(at) if a.has(at) else a.get("axes") or range(a[0].ndim)
    return sorted(axis % a[0].ndim for axis in axes)


def _reduction(function: Callable[..., Tensor]) -> Operation:
    def run(a: Arguments) -> Tensor:
        return function(a[0], dim=_axes(a), keepdim=bool(a.get("keepdims", 1)))

    return Operation(run, host=(1,))


def _divide(a: Tensor, b: Tensor) -> Tensor:
    return a / b if a.is_floating_point() else torch.div(a, b, rounding_mode="trunc")


def _cast(value: Tensor, kind: torch.dtype) -> Tensor:
    if kind is torch.float8_e4m3fn:  # ONNX's saturates
        return value.float().clamp(-E4M3_MOST, E4M3_MOST).to(kind)
    return value if value.dtype is kind else value.to(kind)


def _reshape(a: Arguments) -> Tensor:
    wanted = a.integers(1)
    if not a.get("allowzero", 0):
        wanted = [a[0].shape[at] if size == 0 else size for at, size in enumerate(wanted)]
    return a[0].reshape(wanted)


def _unsqueeze(a: Arguments) -> Tensor:
    value, axes = a[0], a.integers(1)
    for axis in sorted(axis % (value.ndim + len(axes)) for axis in axes):
        value = value.unsqueeze(axis)
    return value


def _squeeze(a: Arguments) -> Tensor:
    value = a[0]
    axes = _axes(a) if a.has(1) else [at for at, size in enumerate(value.shape) if size == 1]
    for axis in reversed(axes):
        value = value.squeeze(axis)
    return value


def _slice(a: Arguments) -> Tensor:
    value, starts, ends = a[0], a.integers(1), a.integers(2)
    axes = a.integers(3) if a.has(3) else range(len(starts))
    steps = a.integers(4) if a.has(4) else [1] * len(starts)
    index = [slice(None)] * value.ndim
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        if step < 1:
            raise ValueError(f"a slice by {step}")
        size = value.shape[axis]
        start, end = (min(max(0, one + size if one < 0 else one), size) for one in (start, end))
        index[axis] = slice(start, max(start, end), step)
    return value[tuple(index)]


def _gather(a: Arguments) -> Tensor:
    value, index, axis = a[0], a[1], a.get("axis", 0) % a[0].ndim
    if index.ndim == 0 and index.device.type == "cpu":
        return value.select(axis, int(index))
    if value.device.type == "cpu" and value.dtype is not torch.float8_e4m3fn:
        size = value.shape[axis]
        if index.numel() and not -size <= int(index.min()) <= int(index.max()) < size:
            raise IndexError(f"an index is not within {size}")
    index = torch.where(index < 0, index + value.shape[axis], index)
    bits = value.view(torch.uint8) if value.dtype is torch.float8_e4m3fn else value
    taken = bits.index_select(axis, index.reshape(-1)).view(value.dtype)
    return taken.reshape(*value.shape[:axis], *index.shape, *value.shape[axis + 1 :])


def _gather_nd(a: Arguments) -> Tensor:
    value, index, lead = a[0], a[1], a.get("batch_dims", 0)
    parts = list(index.unbind(-1))
    for axis in range(lead):
        shape = [1] * parts[0].ndim
        shape[axis] = -1
        parts.insert(axis, torch.arange(value.shape[axis], device=index.device).reshape(shape))
    return value[tuple(parts)]


def _scatter_nd(a: Arguments) -> Tensor:
    data = a[0] if a.in_place else a[0].clone()
    is_sum = a.get("reduction", "none") == "add"
    return data.index_put_(tuple(a[1].unbind(-1)), _cast(a[2], data.dtype), accumulate=is_sum)


def _tensor_scatter(a: Arguments) -> Tensor:
    cache, rows, axis = a[0] if a.in_place else a[0].clone(), a[1], a.get("axis", -2) % a[0].ndim
    index = torch.arange(rows.shape[axis], device=cache.device)[None, :]
    if a.has(2):
        index = a[2][:, None] + index
    shape = [1] * cache.ndim
    shape[0], shape[axis] = index.shape
    return cache.scatter_(axis, index.reshape(shape).expand(rows.shape), _cast(rows, cache.dtype))


def _expand(a: Arguments) -> Tensor:
    return a[0].expand(torch.broadcast_shapes(a[0].shape, tuple(a.integers(1))))


def _pad(a: Arguments) -> Tensor:
    value, pads = a[0], a.integers(1)
    axes = a.integers(3) if a.has(3) else range(value.ndim)
    fill = a[2].item() if a.has(2) else 0
    for axis, before, after in zip(axes, pads, pads[len(pads) // 2 :], strict=False):
        if a.get("mode", "constant") == "edge":
            last = value.shape[axis] - 1
            index = torch.arange(-before, last + 1 + after, device=value.device).clamp(0, last)
            value = value.index_select(axis, index)
        elif before or after:
            behind = [0, 0] * (value.ndim - 1 - axis % value.ndim)
            value = F.pad(value, [*behind, before, after], value=fill)
    return value


def _split(a: Arguments) -> tuple[Tensor, ...]:
    axis = a.get("axis", 0)
    size = a[0].shape[axis]
    return a[0].split(a.integers(1) if a.has(1) else -(-size // a.outputs), axis)


def _shape(a: Arguments) -> Tensor:
    return torch.tensor(list(a[0].shape)[a.get("start", 0) : a.get("end")], dtype=torch.int64)


def _constant(a: Arguments) -> Tensor:
    (name, value), *_ = a.attributes.items()
    if name == "value":
        return value
    kind = torch.int64 if name.startswith("value_int") else torch.float32
    return torch.tensor(value, dtype=kind)


def _constant_of_shape(a: Arguments) -> Tensor:
    value = a.get("value", torch.zeros(1))
    return value.reshape(()).expand(a.integers(0)).clone()


def _top_k(a: Arguments) -> tuple[Tensor, Tensor]:
    """Sorted, of equal ones the first first, which `torch.topk` does not promise."""
    axis, count = a.get("axis", -1), a.integers(1)[0]
    order = a[0].sort(dim=axis, descending=bool(a.get("largest", 1)), stable=True)
    return order.values.narrow(axis, 0, count), order.indices.narrow(axis, 0, count)


def _range(a: Arguments) -> Tensor:
    start, end, step = (a[at].item() for at in range(3))
    return torch.arange(start, end, step, dtype=a[0].dtype)


def _bit_shift(a: Arguments) -> Tensor:
    """Of words without a sign, whatever PyTorch thinks that they are."""
    if a.get("direction") == "LEFT":
        return a[0] << a[1]
    return (a[0] >> a[1]) & ~(torch.tensor(-1, device=a[0].device) << (64 - a[1]))


def _gemm(a: Arguments) -> Tensor:
    left, right = (a[at].t() if a.get(f"trans{'AB'[at]}", 0) else a[at] for at in range(2))
    alpha, beta = a.get("alpha", 1.0), a.get("beta", 1.0)
    if not a.has(2):
        return left @ right if alpha == 1.0 else left @ right * alpha
    return torch.addmm(a[2], left, right, alpha=alpha, beta=beta)


def _arg(function: Callable[..., Tensor]) -> Operation:
    def run(a: Arguments) -> Tensor:
        return function(a[0], dim=a.get("axis", 0), keepdim=bool(a.get("keepdims", 1)))

    return Operation(run)


def _cum_sum(a: Arguments) -> Tensor:
    axis = a.integers(1)[0]
    total = a[0].cumsum(axis)
    return total - a[0] if a.get("exclusive", 0) else total


def _is_infinite(a: Arguments) -> Tensor:
    return a[0] == torch.inf if not a.get("detect_negative", 1) else a[0].isinf()


def _steps(a: Arguments) -> Tensor:
    """Scales as the values that they scale: one, or one for every block along an axis."""
    values, scale, block = a[0], a[1], a.get("block_size", 0)
    if not block:
        return scale
    return scale.float().repeat_interleave(block, a.get("axis", 1) % values.ndim)


def _quantize(a: Arguments) -> Tensor:
    return _cast(a[0].float() / a[1].float(), TYPES[a.get("output_dtype")])


def _dequantize(a: Arguments) -> Tensor:
    kind = a.get("output_dtype", 0)
    values = a[0].float() * _steps(a).float()
    return _cast(values, TYPES[kind] if kind else a[1].dtype)


_PLAIN = """
Neg neg  Abs abs  Exp exp  Log log  Sqrt sqrt  Sigmoid sigmoid  Tanh tanh  Round round  Not
logical_not  And logical_and  Or logical_or  Add add  Sub sub  Mul mul  Mod remainder  MatMul matmul
Equal eq  Less lt  LessOrEqual le  Greater gt  GreaterOrEqual ge  BitwiseAnd bitwise_and
BitwiseOr bitwise_or  BitwiseXor bitwise_xor  IsNaN isnan  Where where  Clip clamp
""".split()
"""Operations of one tensor after another, and what PyTorch calls them."""

OPERATIONS: Mapping[str, Operation] = {
    name: _each(getattr(torch, own)) for name, own in zip(_PLAIN[::2], _PLAIN[1::2], strict=True)
} | {
    "Div": _each(_divide),
    "Identity": _each(lambda value: value),
    "Min": _fold(torch.minimum),
    "Max": _fold(torch.maximum),
    "ReduceMax": _reduction(torch.amax),
    "ReduceSum": _reduction(torch.sum),
    "ReduceSumSquare": _reduction(lambda x, **how: torch.sum(x * x, **how)),
    "ArgMax": _arg(torch.argmax),
    "ArgMin": _arg(torch.argmin),
    "BitShift": Operation(_bit_shift),
    "IsInf": Operation(_is_infinite),
    "Gelu": Operation(lambda a: F.gelu(a[0], approximate=a.get("approximate", "none"))),
    "Softmax": Operation(lambda a: a[0].float().softmax(a.get("axis", -1)).to(a[0].dtype)),
    "Cast": Operation(lambda a: _cast(a[0], TYPES[a.get("to")])),
    "CastLike": Operation(lambda a: _cast(a[0], a[1].dtype)),
    "Concat": Operation(lambda a: torch.cat([a[at] for at in range(len(a.given))], a.get("axis"))),
    "Transpose": Operation(lambda a: a[0].permute(a.get("perm") or list(range(a[0].ndim))[::-1])),
    "Shape": Operation(_shape),
    "Size": Operation(lambda a: torch.tensor(a[0].numel())),
    "Constant": Operation(_constant),
    "Gather": Operation(_gather),
    "GatherElements": Operation(lambda a: a[0].gather(a.get("axis", 0), a[1])),
    "GatherND": Operation(_gather_nd),
    "ScatterND": Operation(_scatter_nd),
    "ScatterElements": Operation(lambda a: a[0].scatter(a.get("axis", 0), a[1], a[2])),
    "TensorScatter": Operation(_tensor_scatter),
    "NonZero": Operation(lambda a: a[0].nonzero().t()),
    "Unique": Operation(lambda a: a[0].unique(sorted=True)),
    "Gemm": Operation(_gemm),
    "QuantizeLinear": Operation(_quantize),
    "DequantizeLinear": Operation(_dequantize),
    "TRT_FP4DynamicQuantize": Operation(fused.quantize_fp4),
    "RMSNormalization": Operation(fused.rms_norm),
    "RotaryEmbedding": Operation(fused.rotate),
    "Attention": Operation(fused.attend),
    "TRT_Attention": Operation(fused.attend_natively),
    "CausalConvWithState": Operation(fused.convolve),
    "LinearAttentionGate": Operation(fused.gate),
    "LinearAttention": Operation(fused.recur),
    "Reshape": Operation(_reshape, host=(1,)),
    "Unsqueeze": Operation(_unsqueeze, host=(1,)),
    "Squeeze": Operation(_squeeze, host=(1,)),
    "Slice": Operation(_slice, host=(1, 2, 3, 4)),
    "Expand": Operation(_expand, host=(1,)),
    "Pad": Operation(_pad, host=(1, 2, 3)),
    "Split": Operation(_split, host=(1,)),
    "ConstantOfShape": Operation(_constant_of_shape, host=(0,)),
    "Range": Operation(_range, host=(0, 1, 2)),
    "TopK": Operation(_top_k, host=(1,)),
    "CumSum": Operation(_cum_sum, host=(1,)),
}

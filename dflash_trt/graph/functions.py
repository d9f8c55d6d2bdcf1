"""Model-local functions: each is the executable definition of one operation.

ONNX Runtime runs the bodies. TensorRT has a layer for `trt::TRT_Attention`, and plugins for
`dflash::` names without a function. ONNX's `overload` tells two bodies of one name apart.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

import onnx
import onnx.parser
from onnx import TensorProto, helper

OPSET = 24
IR_VERSION = 11
TRT_DOMAIN = "trt"
DFLASH_DOMAIN = "dflash"
CONTRIB_DOMAIN = "com.microsoft"

AttentionOverload = Literal["lower_right", "none", "masked", "explicit"]

# ONNX Runtime computes a single query row with another kernel, whose bits differ from those of the
# same row among others. So a row is put in front and dropped again: in front, because lower-right
# causality counts from the last row. `q` is pre-scaled, as TensorRT's attention wants it.
_ATTENTION = """
TRT_Attention <causal_kind> (q, k, v, mask, query_lengths, key_value_lengths) => (attended)
{{
    let front = [0, 0, 1, 0, 0, 0, 0, 0]
    rows = Pad <mode = "edge"> (q, front)
    {mask_rows}
    lengths = Cast <to = 7> (key_value_lengths)
    padded = Attention <scale = 1.0, is_causal = {causal}> (rows, k, v, {mask}, "", "", lengths)
    let one = [1], end = [2147483647], row_axis = [2]
    attended = Slice (padded, one, end, row_axis)
}}
"""

# The queries of a KV head are rows of one product, which reads each key once for all of them. They
# are two at least, so none is put in front; a mask stands for causality, which would count them.
# Not written out in products: those share one head among threads where there are few, and the order
# of their sums, and so their bits, would depend on threads and sequences.
_ATTENTION_BY_KV_HEAD = """
TRT_Attention <causal_kind> (q, k, v, mask, query_lengths, key_value_lengths) => (attended)
{{
    let by_kv_head = [0, {kv_heads}, -1, {head_dim}], by_head = [0, {heads}, -1, {head_dim}]
    rows = Reshape (q, by_kv_head)
    {mask_rows}
    lengths = Cast <to = 7> (key_value_lengths)
    grouped = Attention <scale = 1.0, is_causal = 0> (rows, k, v, {mask}, "", "", lengths)
    attended = Reshape (grouped, by_head)
}}
"""

# TensorRT's own, which is given no lengths: a mask says all (docs/tensorrt.md).
_EXPLICIT_ATTENTION = """
TRT_Attention <causal_kind> (q, k, v, mask) => (attended)
{
    let front = [0, 0, 1, 0, 0, 0, 0, 0]
    rows = Pad <mode = "edge"> (q, front)
    mask_rows = Pad <mode = "edge"> (mask, front)
    padded = Attention <scale = 1.0, is_causal = 0> (rows, k, v, mask_rows)
    let one = [1], end = [2147483647], row_axis = [2]
    attended = Slice (padded, one, end, row_axis)
}
"""

# SwiGLU's elementwise half: silu(gate) * up.
_SWIGLU = """
swiglu (gate, up) => (y)
{
    sigmoid = Sigmoid (gate)
    silu = Mul (gate, sigmoid)
    y = Mul (silu, up)
}
"""

_GEGLU = """
geglu (gate, up) => (y)
{
    gelu = Gelu <approximate = "tanh"> (gate)
    y = Mul (gelu, up)
}
"""

# ONNX Runtime's ReduceMax skips NaN. x - x is 0 where x is finite, else NaN.
_AMAX = """
amax (x) => (y)
{
    magnitude = Abs (x)
    largest = ReduceMax <keepdims = 0> (magnitude)
    nothing = Sub (x, x)
    doubt = ReduceSum <keepdims = 0> (nothing)
    y = Add (largest, doubt)
}
"""


_LET = re.compile(r"^ *let (.+)$", re.MULTILINE)
_VALUE = re.compile(r"(\w+) = (\[[^\]]*\]|[^,\s]+)")


def define(
    text: str,
    constants: Mapping[str, TensorProto] = MappingProxyType({}),
    *,
    domain: str = DFLASH_DOMAIN,
    overload: str | None = None,
    contrib: bool = False,
) -> onnx.FunctionProto:
    """The function that `text` defines in ONNX's text format, with `constants` before its nodes.

    A line `let NAME = VALUE, …` stands for constants: integers, floats, lists of integers, or
    @ATTRIBUTE, an integer. With `contrib` it may use ONNX Runtime's own operations.
    """
    text = _LET.sub(_write_constants, text)
    opsets = f'"" : {OPSET}' + f', "{CONTRIB_DOMAIN}" : 1' * contrib
    function = onnx.parser.parse_function(f'<domain: "{domain}", opset_import: [{opsets}]>{text}')
    nodes = [
        *(
            helper.make_node("Constant", [], [name], value=value)
            for name, value in constants.items()
        ),
        *function.node,
    ]
    del function.node[:]
    function.node.extend(nodes)
    if overload is not None:
        function.overload = overload
    return function


def _write_constants(line: re.Match[str]) -> str:
    lines = []
    for name, value in _VALUE.findall(line[1]):
        is_integer = value.removeprefix("-").isdecimal()
        kind = {"[": "ints", "@": "int: int"}.get(value[0], "int" if is_integer else "float")
        lines.append(f"{name} = Constant <value_{kind} = {value}> ()")
    return "\n".join(lines)


def attention_function(overload: AttentionOverload) -> onnx.FunctionProto:
    """`trt::TRT_Attention`: attention over a padded KV cache with per-sequence lengths.

    q [B,H_q,S,D] pre-scaled by 1/sqrt(D); k, v [B,H_kv,M,D]; key_value_lengths int32 [B].
    "lower_right": row i of S sees key j where j <= i + (length - S). "none": every key below
    the length. "masked": additionally mask bool [B,1,S,M] must be true. "explicit": no lengths are
    given, a key counts where the mask is true, as one does for every row.
    """
    if overload == "explicit":
        return define(_EXPLICIT_ATTENTION, domain=TRT_DOMAIN, overload=overload)
    masked = overload == "masked"
    text = _ATTENTION.format(
        mask_rows='mask_rows = Pad <mode = "edge"> (mask, front)' if masked else "",
        mask="mask_rows" if masked else '""',
        causal=int(overload == "lower_right"),
    )
    return define(text, domain=TRT_DOMAIN, overload=overload)


def grouped_attention_function(
    heads: int, kv_heads: int, head_dim: int, *, masked: bool
) -> onnx.FunctionProto:
    """`trt::TRT_Attention` by KV head, each of several heads: a key counts where mask is true.

    The mask bool [B,1,S,M] is there only if `masked`; without, each key below the length counts.
    """
    groups = heads // kv_heads
    text = _ATTENTION_BY_KV_HEAD.format(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        mask_rows=f"mask_rows = Concat <axis = 2> ({', '.join(['mask'] * groups)})" * masked,
        mask="mask_rows" if masked else '""',
    )
    overload = f"{heads}_by_{kv_heads}_{head_dim}{'_masked' * masked}"
    return define(text, domain=TRT_DOMAIN, overload=overload)


def swiglu_function() -> onnx.FunctionProto:
    """`dflash::swiglu`: silu(gate) * up, elementwise."""
    return define(_SWIGLU)


def geglu_function() -> onnx.FunctionProto:
    """`dflash::geglu`: gelu(gate) * up, elementwise, by the tanh approximation."""
    return define(_GEGLU)


def amax_function() -> onnx.FunctionProto:
    """`dflash::amax`: the largest magnitude in x, a scalar; NaN where any of x is not finite."""
    return define(_AMAX)

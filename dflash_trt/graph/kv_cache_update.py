"""`dflash::kv_cache_update…`, `kv_feature_injection…`: a layer's K and V into its caches.

`_paged` writes to pools of pages (see caches/cpu.py), `_fp8` rounds to what E4M3 holds: code =
E4M3(x / scale) of a scale for K and one for V of each layer (quantization/codecs.py). Float32
caches hold code · scale, narrow ones the codes, which bodies write as float32: ONNX Runtime
scatters no FP8. Linear caches of the compute type need no operation of ours but `TensorScatter`.
The second makes a draft layer's context of the target's features, in plain caches as well.
"""

from __future__ import annotations

from functools import cache

import onnx

from dflash_trt.graph.bindings import KV
from dflash_trt.graph.form import CPU_FORM, GraphForm, Precision
from dflash_trt.graph.functions import define

# Equal for every layer and free of the caches' shape, so that ONNX Runtime computes it once a call.
_PAGED_INDEX = """
    let size = @page_size
    column = Div (positions, size)
    place = Mod (positions, size)
    page_of_row = GatherElements <axis = 1> (page_table, column)
    page = Cast <to = 7> (page_of_row)
    let last = [-1]
    page_index = Unsqueeze (page, last)
    place_index = Unsqueeze (place, last)
    index = Concat <axis = -1> (page_index, place_index)"""
_LINEAR_INDEX = """
    let first = 0
    start = Gather <axis = 1> (positions, first)"""

_CODES = """
    {kv}_at = Constant <value_int = {at}> ()
    {kv}_scale = Gather (kv_scales, {kv}_at)
    {kv}_exact = Cast <to = 1> ({rows})
    {kv}_quotient = Div ({kv}_exact, {kv}_scale)
    {kv}_codes = Cast <to = 17> ({kv}_quotient)
    {kv}_code_values = Cast <to = 1> ({kv}_codes)"""

# k_norm and RoPE come before an injection's writes.
_K_NORMED = """
    k_normed = RMSNormalization <axis = -1, epsilon: float = @epsilon> (k, k_norm)"""
_K_NORMED_NARROW = """
    k_wide = Cast <to = 1> (k)
    k_scaled = RMSNormalization <axis = -1, epsilon: float = @epsilon> (k_wide, k_norm)
    k_normed = Cast <to = {onnx_type}> (k_scaled)"""
_K_ROTATED = """
    k_heads = Transpose <perm = [0, 2, 1, 3]> (k_normed)
    k_rotated = RotaryEmbedding (k_heads, cos, sin, positions)"""
_TURNED = """
    {after} = Transpose <perm = [0, 2, 1, 3]> ({before})"""


@cache
def kv_cache_update_function(form: GraphForm) -> onnx.FunctionProto:
    """`dflash::kv_cache_update` with the suffix of `form`'s caches, which are paged, FP8 or both.

    k, v [B,H_kv,S,D] after norm and RoPE; positions int64 [B,S]; page_table int32 [B,C] where
    paged; caches, updated in place by the executor's binding; kv_scales float32 [2] where FP8.
    """
    suffix = "_rows" * form.is_paged
    turned = [_TURNED.format(before=kv, after=f"{kv}_rows") for kv in KV if form.is_paged]
    written = _write_lines(form, f"k{suffix}", f"v{suffix}")
    body = "".join(turned) + _index_lines(form) + written
    attributes = "<page_size>" if form.is_paged else ""
    return _define("kv_cache_update", form, attributes, ["k", "v", "positions"], body)


@cache
def kv_feature_injection_function(form: GraphForm = CPU_FORM) -> onnx.FunctionProto:
    """`dflash::kv_feature_injection` with the suffix of `form`'s caches: features become context.

    k, v [B,S,H_kv,D] as projected from the target's features; k_norm float32 [D]; cos, sin
    [P,D/2]; positions int64 [B,S]; then page_table int32 [B,C], caches and kv_scales float32 [2]
    as `kv_cache_update` has them. The caches are updated in place by the executor's binding.
    """
    body = _index_lines(form) + _K_NORMED
    if form.precision is not Precision.FLOAT32:
        body = _index_lines(form) + _K_NORMED_NARROW.format(onnx_type=form.precision.onnx_type)
    if form.is_paged:
        turned, kv = _TURNED.format(before="k_rotated", after="k_rows"), ("k_rows", "v")
    else:
        turned, kv = _TURNED.format(before="v", after="v_heads"), ("k_rotated", "v_heads")
    body += _K_ROTATED + turned + _write_lines(form, *kv)
    attributes = "<epsilon, page_size>" if form.is_paged else "<epsilon>"
    operands = ["k", "v", "k_norm", "cos", "sin", "positions"]
    return _define("kv_feature_injection", form, attributes, operands, body)


def _define(
    name: str, form: GraphForm, attributes: str, operands: list[str], body: str
) -> onnx.FunctionProto:
    """An operation that writes K and V; its last operands are page table, caches and scales."""
    table, scales = ["page_table"] * form.is_paged, ["kv_scales"] * form.is_fp8
    inputs = ", ".join([*operands, *table, "k_cache", "v_cache", *scales])
    head = f"{name}{cache_suffix(form)} {attributes} ({inputs}) => (k_cache_out, v_cache_out)"
    return define(f"{head}\n{{{body}\n}}")


def cache_suffix(form: GraphForm) -> str:
    """What follows the name of an operation over `form`'s caches."""
    return f"{'_paged' * form.is_paged}{'_fp8' * form.is_fp8}"


def _index_lines(form: GraphForm) -> str:
    """The lines of a body that find where in the caches the rows at `positions` belong."""
    return _PAGED_INDEX if form.is_paged else _LINEAR_INDEX


def _write_lines(form: GraphForm, k: str, v: str) -> str:
    """The lines of a body that write k and v to k_cache_out and v_cache_out.

    They are [B,S,H_kv,D] where `form` is paged, else [B,H_kv,S,D]; `_index_lines` come before.
    """
    lines = ""
    for at, (kv, rows) in enumerate(zip(KV, (k, v), strict=True)):
        cache, result = f"{kv}_cache", f"{kv}_cache_out"
        if form.is_fp8:
            lines += _CODES.format(kv=kv, at=at, rows=rows)
        if form.holds_codes:
            lines += f"\n    {kv}_before = Cast <to = 1> ({cache})"
            rows, cache, result = f"{kv}_code_values", f"{kv}_before", f"{kv}_after"
        elif form.is_fp8:
            lines += f"\n    {kv}_decoded = Mul ({kv}_code_values, {kv}_scale)"
            rows = f"{kv}_decoded"
        if form.is_paged:
            lines += f"\n    {result} = ScatterND ({cache}, index, {rows})"
        else:
            lines += f"\n    {result} = TensorScatter <axis = 2> ({cache}, {rows}, start)"
        if form.holds_codes:
            lines += f"\n    {kv}_cache_out = Cast <to = 17> ({kv}_after)"
    return lines

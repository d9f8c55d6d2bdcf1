"""`dflash::kv_feature_injection…`: the target's features become one draft layer's context.

k_norm, RoPE and the cache write, in the forms that `kv_cache_update` has, and plain.
"""

from __future__ import annotations

from functools import cache

import onnx

from dflash_trt.graph.form import CPU_FORM, GraphForm, Precision
from dflash_trt.graph.functions import define
from dflash_trt.graph.kv_cache_update import cache_operands, cache_suffix, index_lines, write_lines

_INJECTION = """
kv_feature_injection{suffix} <{attributes}> ({inputs}) => (k_cache_out, v_cache_out)
{{{index}
    {k_normed}
    k_heads = Transpose <perm = [0, 2, 1, 3]> (k_normed)
    k_rotated = RotaryEmbedding (k_heads, cos, sin, positions)
    {by_place}{write}
}}
"""
_K_NORMED = "k_normed = RMSNormalization <axis = -1, epsilon: float = @epsilon> (k, k_norm)"
_K_NORMED_NARROW = """k_wide = Cast <to = 1> (k)
    k_scaled = RMSNormalization <axis = -1, epsilon: float = @epsilon> (k_wide, k_norm)
    k_normed = Cast <to = {onnx_type}> (k_scaled)"""


@cache
def kv_feature_injection_function(form: GraphForm = CPU_FORM) -> onnx.FunctionProto:
    """`dflash::kv_feature_injection` with the suffix of `form`'s caches.

    k, v [B,S,H_kv,D] as projected from the target's features; k_norm float32 [D]; cos, sin
    [P,D/2]; positions int64 [B,S]; then page_table int32 [B,C], caches and kv_scales float32 [2]
    as `kv_cache_update` has them. The caches are updated in place by the executor's binding.
    """
    k_normed = _K_NORMED
    if form.precision is not Precision.FLOAT32:
        k_normed = _K_NORMED_NARROW.format(onnx_type=form.precision.onnx_type)
    kv, turned = ("k_rows", "v"), "k_rows = Transpose <perm = [0, 2, 1, 3]> (k_rotated)"
    if not form.is_paged:
        kv, turned = ("k_rotated", "v_heads"), "v_heads = Transpose <perm = [0, 2, 1, 3]> (v)"
    operands = ["k", "v", "k_norm", "cos", "sin", "positions", *cache_operands(form)]
    return define(
        _INJECTION.format(
            suffix=cache_suffix(form),
            attributes="epsilon, page_size" if form.is_paged else "epsilon",
            inputs=", ".join(operands),
            index=index_lines(form),
            k_normed=k_normed,
            by_place=turned,
            write=write_lines(form, *kv),
        )
    )

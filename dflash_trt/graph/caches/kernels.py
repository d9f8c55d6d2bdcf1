"""Caches that only this project's kernels write and read on TensorRT: paged, FP8 or both."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dflash_trt.graph.block_attention import block_attention_function
from dflash_trt.graph.caches.strategy import CacheStrategy, kv_scales, page_table, write_rows
from dflash_trt.graph.form import Precision
from dflash_trt.graph.model_builder import LayerBuilder


@dataclass(frozen=True, slots=True)
class KernelStrategy(CacheStrategy):
    """`dflash::block_attention` in the caches' form; it takes sinks as they are."""

    def attend(self, layer: LayerBuilder, q: str, k: str, v: str) -> str:
        return attend_by_kernel(layer, q, write_rows(layer, k, v))


def attend_by_kernel(layer: LayerBuilder, q: str, caches: Sequence[str]) -> str:
    """Attention of q [B,heads,S,D], pre-scaled, over caches that hold the call's rows."""
    b, form, sizes = layer.b, layer.b.form, layer.sizes
    operands = [q, *caches, layer.rows.lengths]
    if form.is_paged:
        operands.append(page_table(layer))
    if form.is_fp8:
        operands.append(kv_scales(layer))
    if sizes.has_sinks:
        operands.append(layer.weight("sinks", Precision.FLOAT32))
    else:
        none = [-math.inf] * sizes.heads
        name = f"no_sinks_{sizes.heads}"
        operands.append(b.constant(name, [sizes.heads], none, Precision.FLOAT32))
    function, window = block_attention_function(form), sizes.window or 0
    causal = int(sizes.is_causal)
    return b.call(function, operands, "attend", is_causal=causal, window=window)[0]

"""Caches that only this project's kernels write and read on TensorRT: paged, FP8 or both.

The kernels take sinks as what they are, over caches of the model's own head size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dflash_trt.graph.bindings import PAGE_TABLE, Dim
from dflash_trt.graph.block_attention import block_attention_function
from dflash_trt.graph.caches.linear import linear_shape
from dflash_trt.graph.caches.paged import pool_shape
from dflash_trt.graph.caches.strategy import kv_scales, write_rows
from dflash_trt.graph.form import GraphForm, Precision
from dflash_trt.graph.model_builder import LayerBuilder


@dataclass(frozen=True, slots=True)
class KernelStrategy:
    """`dflash::block_attention`, in the form that the caches have."""

    form: GraphForm
    sink_dims: int = 0

    def shape(self, kv_heads: int, head_dim: int) -> tuple[Dim, ...]:
        lay_out = pool_shape if self.form.is_paged else linear_shape
        return lay_out(self.form, kv_heads, head_dim)

    def attend(self, layer: LayerBuilder, q: str, k: str, v: str) -> str:
        b, form, sizes = layer.b, self.form, layer.sizes
        caches = write_rows(layer, k, v)
        operands = [q, *caches, layer.rows.lengths, *[PAGE_TABLE] * form.is_paged]
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

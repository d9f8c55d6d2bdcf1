"""Bytes beside weights and caches: the runtime, a pass's rows, the shares of split attention."""

from __future__ import annotations

from dflash_trt.checkpoints.sizes import DecoderSizes
from dflash_trt.core.limits import Limits
from dflash_trt.graph.caches.native import is_attended_by_kernel, is_decomposed
from dflash_trt.graph.form import GraphForm
from dflash_trt.kernels.attention import scratch_bytes
from dflash_trt.memory.shape import ModelShape

RUNTIME_BYTES = 4 << 30
"""Of CUDA's context, libraries and captured graphs on one GPU: an allowance, not a measurement.

As much as TensorRT-LLM's own check of a draft's context sets aside (pull request 19466).
"""
LOGITS_ITEM_BYTES = 4


def row_bytes(target: ModelShape, vocab_ways: int) -> float:
    """Activations of one row: residual, normed copy, widest projection (bf16), and its logits."""
    sizes = target.sizes
    wide = max(2 * sizes.mlp_size, *(layer.projection_elements for layer in sizes.kinds()))
    return 2 * (2 * sizes.hidden_size + wide) + LOGITS_ITEM_BYTES * target.vocab / vocab_ways


def split_scratch(
    target: DecoderSizes, draft: DecoderSizes, limits: Limits, form: GraphForm, capacity: int
) -> int:
    """Bytes that attention's shares take in the largest call of engines of graphs of `form`.

    `capacity` is the length of their caches. The draft's attention is the plugins', the target's
    where only kernels read its caches, or have heads as large.
    """
    steps = limits.max_batch, limits.block_size
    own = [layer for layer in target.layers if is_attended_by_kernel(layer, form)]
    calls = [(draft.layers, *steps), (own, *steps), (own, 1, limits.prefill_chunk)]
    return max(
        scratch_bytes(
            capacity=capacity,
            block_size=limits.block_size,
            window=window or 0,
            query_heads=heads,
            head_dim=head_dim,
            batch=batch,
            rows=rows,
        )
        for layers, batch, rows in calls
        for heads, head_dim, window in {(one.heads, one.head_dim, one.window) for one in layers}
    )


def decomposed_scratch(target: DecoderSizes, limits: Limits, form: GraphForm, capacity: int) -> int:
    """Bytes that attention takes that is written out, in the largest call of engines of `form`.

    Of one layer: scores and their shares in float32, the shares once more in the compute type, and
    the keys in float32.
    """
    calls = [(limits.max_batch, limits.block_size), (1, limits.prefill_chunk)]
    return max(
        batch
        * capacity
        * (rows * layer.heads * 10 + layer.kv_heads * layer.head_dim * 4)
        * is_decomposed(layer, form)
        for batch, rows in calls
        for layer in target.kinds()
    )

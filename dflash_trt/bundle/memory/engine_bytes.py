"""Memory of one GPU that runs a pair's engines, which hold all of it from their start."""

from __future__ import annotations

from dataclasses import dataclass

from dflash_trt.bundle.memory.cache_bytes import (
    cache_bytes_by_window,
    engine_cache_length,
    state_bytes,
    state_copies,
)
from dflash_trt.bundle.memory.weight_bytes import gathered_bytes
from dflash_trt.core.limits import Limits, PagePool
from dflash_trt.graph.caches.native import is_attended_by_kernel, is_decomposed
from dflash_trt.graph.form import GraphForm
from dflash_trt.hardware.kernels import scratch_bytes
from dflash_trt.models.sizes import DecoderSizes, TargetShape

RUNTIME_BYTES = 4 << 30
"""Of CUDA's context, libraries and captured graphs on one GPU: an allowance, not a measurement.

As much as TensorRT-LLM's own check of a draft's context sets aside (pull request 19466).
"""
LOGITS_ITEM_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    """Bytes that engines of one form and one set of limits take.

    Args:
        caches: of both models, allocated whole: `positions` of layers without pages of their own.
        states: of recurrent layers, of every sequence and of copies.
        gathered: of the experts that the `rows` of the widest pass choose, one layer's.
        shares: of split attention, where kernels of ours are to split it.
        scores: of one layer's attention where no kernel computes it.
    """

    weights: int
    caches: int
    states: int
    gathered: int
    shares: int
    scores: int
    positions: int
    rows: int

    @property
    def total(self) -> int:
        return self.weights + self.caches + self.states + self.gathered + self.shares + self.scores


def engine_memory(
    target: DecoderSizes,
    draft: DecoderSizes,
    weights: int,
    limits: Limits,
    form: GraphForm,
    *,
    pool: PagePool | None = None,
    splits: bool,
) -> EngineMemory:
    """What a pair takes in engines of graphs of `form`; `pool` where its caches are paged.

    `splits` says that our attention kernels are in them.
    """
    capacity = engine_cache_length(limits, target, form)
    positions = limits.max_batch * capacity
    if pool is not None:
        positions = (pool.pages + 1) * pool.page_size
    caches = 0
    for window, token in (
        kind for sizes in (target, draft) for kind in cache_bytes_by_window(sizes, form).items()
    ):
        held = positions if pool is None else (pool.kinds[window] + 1) * pool.page_size
        caches += held * token
    slots = limits.max_batch + state_copies(target, limits, pool)
    rows = max(limits.prefill_chunk, limits.max_batch * limits.block_size)
    return EngineMemory(
        weights=weights,
        caches=caches,
        states=slots * state_bytes(target, form),
        gathered=rows * gathered_bytes(target, form.precision.item_bytes),
        shares=split_scratch(target, draft, limits, form, capacity) if splits else 0,
        scores=decomposed_scratch(target, limits, form, capacity),
        positions=positions,
        rows=rows,
    )


def row_bytes(target: TargetShape, vocab_ways: int) -> float:
    """Activations of one row: residual, normed copy, widest projection (bf16), and its logits."""
    sizes = target.sizes
    wide = max(2 * sizes.mlp_size, *(layer.projection_elements for layer in sizes.kinds))
    return 2 * (2 * sizes.hidden_size + wide) + LOGITS_ITEM_BYTES * target.vocab_size / vocab_ways


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
        for layer in target.kinds
    )

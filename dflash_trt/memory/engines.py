"""Memory of one GPU that runs a pair's engines, which hold all of it from their start."""

from __future__ import annotations

from dataclasses import dataclass

from dflash_trt.checkpoints.sizes import DecoderSizes
from dflash_trt.core.limits import Limits, PagePool
from dflash_trt.graph.form import GraphForm
from dflash_trt.memory.caches import (
    cache_bytes_by_window,
    engine_cache_length,
    state_bytes,
    state_copies,
)
from dflash_trt.memory.gpus import ONE_GPU
from dflash_trt.memory.shape import FORMATS, DraftShape, ModelShape
from dflash_trt.memory.weights import (
    draft_weight_bytes,
    gathered_bytes,
    target_weight_bytes,
    vocab_bytes,
)
from dflash_trt.memory.workspace import decomposed_scratch, split_scratch


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


def shape_weight_bytes(target: ModelShape, draft: DraftShape) -> int:
    """Bytes of a pair's weights in its two engines, by their shapes.

    Packed experts count as `engine_weight_bytes` counts them, four times their bytes. The draft's
    engine has an embedding and an output head of its own.
    """
    weights = target_weight_bytes(target) + draft_weight_bytes(draft)
    if target.experts is not None and target.mlp_format != "bf16":
        experts = target.experts.experts * target.mlp_weights * len(target.sizes.layers)
        weights += 3 * FORMATS[target.mlp_format].bytes(experts)
    return int(weights + vocab_bytes(target, ONE_GPU))

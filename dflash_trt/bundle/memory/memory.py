"""What a pair takes of a device's memory: one record, and one count for engines and bundles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dflash_trt.bundle.manifest import Manifest
from dflash_trt.bundle.memory.cache_bytes import (
    cache_bytes_by_window,
    cache_bytes_per_token,
    engine_cache_length,
    state_bytes,
    state_copies,
)
from dflash_trt.bundle.memory.weight_bytes import gathered_bytes
from dflash_trt.core.formats import INT8_BYTES
from dflash_trt.core.limits import Limits, PagePool
from dflash_trt.graph.caches.native import is_attended_by_kernel, is_decomposed
from dflash_trt.graph.form import GraphForm
from dflash_trt.hardware.kernels import scratch_bytes
from dflash_trt.models.sizes import DecoderSizes

RUNTIME_BYTES = 4 << 30
"""Of CUDA's context, libraries and captured graphs on one GPU: an allowance, not a measurement.

As much as TensorRT-LLM's own check of a draft's context sets aside (pull request 19466).
"""
LOGITS_ITEM_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes on one device, by what takes them.

    Args:
        target_weights, draft_weights: a head that the draft holds of its own included.
        target_cache, draft_cache: K and V.
        states: of recurrent layers.
        workspace: the runtime, logits and whatever else a pass takes.
    """

    target_weights: float
    draft_weights: float
    target_cache: float
    draft_cache: float
    states: float
    workspace: float

    @property
    def weights(self) -> float:
        return self.target_weights + self.draft_weights

    @property
    def caches(self) -> float:
        return self.target_cache + self.draft_cache

    @property
    def total(self) -> float:
        return self.weights + self.caches + self.states + self.workspace


def engine_memory(
    target: DecoderSizes,
    draft: DecoderSizes,
    weights: tuple[int, int],
    vocab_size: int,
    limits: Limits,
    form: GraphForm,
    *,
    pool: PagePool | None = None,
) -> Memory:
    """What a pair takes in engines of graphs of `form`, which hold all of it from their start.

    Args:
        weights: bytes of the target's and of the draft's.
        pool: where caches are paged.
    """
    capacity = engine_cache_length(limits, target, form)
    rows = max(limits.prefill_chunk, limits.max_batch * limits.block_size)
    return Memory(
        target_weights=weights[0],
        draft_weights=weights[1],
        target_cache=_allocated(target, limits, form, pool, capacity),
        draft_cache=_allocated(draft, limits, form, pool, capacity),
        states=_state_bytes(target, limits, form, pool),
        workspace=RUNTIME_BYTES
        + rows * vocab_size * LOGITS_ITEM_BYTES
        + rows * gathered_bytes(target, form.precision.item_bytes)
        + split_scratch(target, draft, limits, form, capacity)
        + decomposed_scratch(target, limits, form, capacity)
        + mask_bytes(target, draft, limits, form, capacity),
    )


def _allocated(
    sizes: DecoderSizes,
    limits: Limits,
    form: GraphForm,
    pool: PagePool | None,
    capacity: int,
    spare: int = 1,
) -> int:
    """Bytes of a model's caches; `spare` pages of each kind belong to no sequence."""
    return sum(
        token
        * (
            limits.max_batch * capacity
            if pool is None
            else (pool.kinds[window] + spare) * pool.page_size
        )
        for window, token in cache_bytes_by_window(sizes, form).items()
    )


def _state_bytes(
    target: DecoderSizes, limits: Limits, form: GraphForm, pool: PagePool | None
) -> int:
    slots = limits.max_batch + state_copies(target, limits, pool)
    return slots * state_bytes(target, form)


def bundle_memory(manifest: Manifest) -> Memory:
    """What a bundle takes; engines count as their files weigh, and hold all from their start.

    Without engines weights count in the compute type, experts as stored, eight-bit copies in place
    of what they were made of, and on the CPU the target's output head twice, since the draft's
    session packs it once more. There caches grow with tokens up to what counts here (linear ones to
    twice that for moments). A pass's workspace does not count.
    """
    target, draft, engines = manifest.target, manifest.draft, engine_bytes(manifest)
    limits, form, pool = manifest.limits, manifest.graph_form, manifest.page_pool
    if manifest.engines is not None:
        return engine_memory(
            target.sizes,
            draft.sizes,
            (engines["target"], engines["draft"]),
            target.vocab_size,
            limits,
            form,
            pool=pool,
        )
    item, weights = form.precision.item_bytes, list[float]()
    for model in (target, draft):
        stored: float = 0
        decoded = model.parameters
        if (experts := model.experts) is not None:
            stored, decoded = experts.weight_bytes, decoded - experts.parameters
        if model.int8 is not None:
            stored, decoded = stored + model.int8.weight_bytes, decoded - model.int8.parameters
        weights.append(stored + decoded * item)
    if manifest.is_on_cpu and not (draft.traits.owns_head or "lm_head" in draft.owned):
        size = item if target.int8 is None else INT8_BYTES
        weights[1] += (draft.token_count or target.vocab_size) * target.hidden_size * size
    length, spare = form.cache_length or limits.max_seq_len, int(not manifest.is_on_cpu)
    return Memory(
        target_weights=weights[0],
        draft_weights=weights[1],
        target_cache=_allocated(target.sizes, limits, form, pool, length, spare),
        draft_cache=_allocated(draft.sizes, limits, form, pool, length, spare),
        states=_state_bytes(target.sizes, limits, form, pool),
        workspace=0,
    )


def engine_bytes(manifest: Manifest) -> Mapping[str, int]:
    """Size of each engine's file, by graph; empty for a CPU bundle."""
    sizes = {file.path: file.bytes for file in manifest.files}
    engines = manifest.engines.files if manifest.engines else []
    return {engine.graph: sizes[engine.path] for engine in engines}


def token_bytes(manifest: Manifest) -> tuple[int, int]:
    """Bytes per token of the target's and the draft's caches, in the type that they have."""
    target, draft, form = manifest.target.sizes, manifest.draft.sizes, manifest.graph_form
    return cache_bytes_per_token(target, form), cache_bytes_per_token(draft, form)


def page_kinds(manifest: Manifest) -> dict[int | None, tuple[int, int]]:
    """How many pages there are of each kind, by window, and the bytes of each; both models'."""
    pool = manifest.page_pool
    if pool is None:
        return {}
    sizes, form = (manifest.target.sizes, manifest.draft.sizes), manifest.graph_form
    by_window = [cache_bytes_by_window(one, form) for one in sizes]
    return {
        window: (pages, pool.page_size * sum(one.get(window, 0) for one in by_window))
        for window, pages in pool.kinds.items()
    }


def split_scratch(
    target: DecoderSizes, draft: DecoderSizes, limits: Limits, form: GraphForm, capacity: int
) -> int:
    """Bytes that attention's shares take in the largest call of engines of graphs of `form`.

    `capacity` is the length of their caches.
    """
    steps = limits.max_batch, limits.block_size
    calls = [(draft, *steps), (target, *steps), (target, 1, limits.prefill_chunk)]
    sizes = (
        scratch_bytes(
            capacity=capacity,
            block_size=limits.block_size,
            window=window or 0,
            query_heads=heads,
            head_dim=head_dim,
            batch=batch,
            rows=rows,
        )
        for model, batch, rows in calls
        for heads, head_dim, window in {
            (one.heads, one.head_dim, one.window)
            for one in model.layers
            if is_attended_by_kernel(one, form, needs_room=model.needs_sink_room)
        }
    )
    return max(sizes, default=0)


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


def mask_bytes(
    target: DecoderSizes, draft: DecoderSizes, limits: Limits, form: GraphForm, capacity: int
) -> int:
    """Bytes of the masks by which TensorRT's own attention knows what it may read.

    In the largest call: rows times `capacity` for a sequence, and for each kind of layer.
    """
    steps = limits.max_batch * limits.block_size
    # A chain's steps share one mask, of two rows (graph/caches/native.py).
    drafts = limits.max_batch * 2 if draft.features else steps
    calls = [(draft, drafts), (target, max(steps, limits.prefill_chunk))]
    return max(
        rows
        * capacity
        * len(
            {
                (one.window, one.is_causal, one.has_sinks)
                for one in sizes.layers
                if one.recurrent is None
                and not is_attended_by_kernel(one, form, needs_room=sizes.needs_sink_room)
            }
        )
        for sizes, rows in calls
    )

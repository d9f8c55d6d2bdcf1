"""Bytes of KV caches: of a graph's form, of a planned context, of a draft's context held whole."""

from __future__ import annotations

import math

from dflash_trt.bundle.memory.gpu_layout import ONE_GPU, GpuLayout
from dflash_trt.core.limits import Limits, PagePool
from dflash_trt.graph.caches import stores_sinks
from dflash_trt.graph.form import GraphForm
from dflash_trt.graph.tensors import CacheShape, cache_layout
from dflash_trt.models.sizes import DecoderSizes, DraftShape

KV_ITEM_BYTES = 2
STATE_ITEM_BYTES = 4
POSITION_STEP = 16
USUAL_CONTEXTS = (2048, 8192, 32768, 131072)


def cache_bytes_by_window(sizes: DecoderSizes, form: GraphForm) -> dict[int | None, int]:
    """Bytes of K and V for one token of one sequence, in graphs of `form`.

    By the window of layers whose pages hold no more than what it needs; None: of all others.
    """
    found: dict[int | None, int] = {}
    for one in cache_layout(form, sizes).target:
        if isinstance(one, CacheShape):
            size = 2 * one.kv_heads * one.head_dim * form.cache_item_bytes
            found[one.window] = found.get(one.window, 0) + size
    return found


def cache_bytes_per_token(sizes: DecoderSizes, form: GraphForm) -> int:
    """Bytes of K and V of every layer for one token of one sequence, in graphs of `form`."""
    return sum(cache_bytes_by_window(sizes, form).values())


def state_bytes(sizes: DecoderSizes, form: GraphForm) -> int:
    """Bytes that a sequence has in recurrent layers, whatever its length: float32."""
    held = cache_layout(form, sizes).states().values()
    return STATE_ITEM_BYTES * sum(math.prod(one) for one in held)


def state_copies(sizes: DecoderSizes, limits: Limits, pool: PagePool | None) -> int:
    """Copies of a sequence's states, for prefixes that are shared; 0 without pages.

    For every slot one of its prompt's end, one of its output, and one where prompts part.
    """
    return 3 * limits.max_batch if sizes.has_state and pool is not None else 0


def planned_state_bytes(sizes: DecoderSizes, layout: GpuLayout = ONE_GPU) -> float:
    """Bytes on one GPU of a sequence's states, without the rows that are kept beside them."""
    layers = [layer.recurrent for layer in sizes.layers if layer.recurrent is not None]
    elements = sum(one.state_elements for one in layers)
    return STATE_ITEM_BYTES * elements / layout.attention_ways


def deployed_state_bytes(sizes: DecoderSizes, drafts: int, layout: GpuLayout = ONE_GPU) -> float:
    """Bytes on one GPU of a sequence's states under TensorRT-LLM, which keeps them row by row.

    Beside the state in float32, and the rows of the convolution in bf16, its buffers for DFlash
    hold those of 2 × `drafts` rows (pull request 13782).
    """
    layers = [layer.recurrent for layer in sizes.layers if layer.recurrent is not None]
    rows = sum(one.channels * (one.kernel - 1) for one in layers) / layout.attention_ways
    return (1 + 2 * drafts) * (planned_state_bytes(sizes, layout) + KV_ITEM_BYTES * rows)


def engine_cache_length(limits: Limits, target: DecoderSizes, form: GraphForm) -> int:
    """M of engines of graphs of `form`, whose own cache length is not used.

    max_seq_len, one more where caches store the target's sinks (graph/caches/native.py), rounded
    up to whole pages or to TensorRT's alignment of slots: 16 positions of 8 elements, 256 bytes.
    """
    has_sinks = any(layer.has_sinks for layer in target.layers)
    positions = limits.max_seq_len + stores_sinks(has_sinks, form)
    step = form.page_size or POSITION_STEP
    return -(-positions // step) * step


def kv_bytes(
    sizes: DecoderSizes,
    context: float,
    layout: GpuLayout = ONE_GPU,
    item_bytes: int = KV_ITEM_BYTES,
) -> float:
    """Bytes on one GPU of a sequence of `context` tokens; a window holds no more than itself."""
    total = 0.0
    for layer, windows in sizes.windows_by_kind.items():
        positions = sum(
            count * (context if window is None else min(context, window))
            for window, count in windows.items()
        )
        total += positions * layer.kv_elements * item_bytes / layout.kv_ways(layer)
    return total


def dense_draft_context_bytes(
    draft: DraftShape, max_batch: int, max_seq_len: int, layout: GpuLayout = ONE_GPU
) -> int:
    """Bytes on one GPU of a draft context allocated at once, as TensorRT-LLM's VANILLA does.

    [max_batch + 1, layers, max_seq_len + block, kv heads, head size] for K and for V.
    """
    tokens = (max_batch + 1) * (max_seq_len + draft.block_size)
    return sum(
        tokens * len(layers) * layer.kv_elements * KV_ITEM_BYTES // layout.kv_ways(layer)
        for layer, layers in draft.sizes.kinds.items()
    )

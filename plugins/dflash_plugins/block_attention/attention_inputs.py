"""Inputs of `block_attention` with NaN wherever it must not read, and functions that run it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dflash_plugins.block_attention.cases import AttentionShape, make_cases
from dflash_plugins.block_attention.reference import block_attention
from dflash_plugins.operation import DType
from dflash_plugins.testing.numeric import Array, Run

Inputs = dict[str, Array]

KV_SCALES = np.array([0.5, 3.0], np.float32)


def make_inputs(
    shape: AttentionShape,
    lengths: Sequence[int],
    rows: int | None = None,
    *,
    has_sinks: bool = False,
    score_size: float = 2.0,
    seed: int = 0,
) -> Inputs:
    """Random inputs: sequence b has lengths[b] cached positions, the last `rows` its query rows.

    All other positions are NaN, as are positions before the window and free pages. A page table
    names a free page past the sequence's last one. `score_size` is the standard deviation of
    scores; sqrt(D) is that of a model that does not scale q.
    """
    generator = np.random.default_rng(seed)
    rows = rows or shape.block_size
    batch, size, dtype = len(lengths), shape.head_dim, shape.compute.numpy
    q_shape = (batch, shape.query_heads, rows, size)
    q = generator.standard_normal(q_shape) * score_size / np.sqrt(size)
    inputs: Inputs = {"q": q.astype(dtype)}
    caches = {name: _cache(generator, shape, lengths, rows) for name in ("k_cache", "v_cache")}
    inputs["key_value_lengths"] = np.array(lengths, np.int32)
    if shape.page_size is not None:
        table = _page_table(generator, shape, lengths)
        caches = {name: _paged(cache, table, shape.page_size) for name, cache in caches.items()}
        inputs["page_table"] = table
    inputs |= {name: cache.astype(shape.cache.numpy) for name, cache in caches.items()}
    if shape.cache is DType.FLOAT8:
        inputs["kv_scales"] = KV_SCALES
    sinks = generator.standard_normal(shape.query_heads).astype(np.float32)
    inputs["sinks"] = sinks if has_sinks else np.full_like(sinks, -np.inf)
    return inputs


def attend(run: Run, shape: AttentionShape, inputs: Inputs) -> Array:
    """attended [B,H_q,S,D], by one operation or by the split and the merge."""
    batch, _, rows, _ = inputs["q"].shape
    known: Inputs = dict(inputs)
    for case in make_cases("", shape, batch=batch, rows=rows):
        own = {name: known[name] for name in case.operation.inputs}
        known |= run(case.operation.name, own, case.attributes)
    return known["attended"]


def expect(shape: AttentionShape, inputs: Inputs) -> Array:
    """attended [B,H_q,S,D] in float64, by the reference."""
    return block_attention(inputs, is_causal=shape.is_causal, window=shape.window)


def _cache(
    generator: np.random.Generator, shape: AttentionShape, lengths: Sequence[int], rows: int
) -> Array:
    cache = np.full((len(lengths), shape.kv_heads, shape.length, shape.head_dim), np.nan)
    for b, length in enumerate(lengths):
        first = max(0, length - rows - shape.window + 1) if shape.window else 0
        held = cache[b, :, first:length]
        held[...] = generator.standard_normal(held.shape)
    return cache


def _page_table(
    generator: np.random.Generator, shape: AttentionShape, lengths: Sequence[int]
) -> Array:
    """A shuffled page table [B,pages]; unused entries name the pool's last page, all NaN."""
    assert shape.page_size is not None
    pages = -(-shape.length // shape.page_size)
    count = len(lengths) * pages
    table = generator.permutation(count).reshape(len(lengths), pages).astype(np.int32)
    for b, length in enumerate(lengths):
        table[b, -(-length // shape.page_size) :] = count
    return table


def _paged(cache: Array, table: Array, page_size: int) -> Array:
    """The pool [pages,page_size,H_kv,D] that holds `cache` [B,H_kv,M,D] by the page table."""
    batch, heads, length, size = cache.shape
    pages = table.shape[1]
    rows = np.full((batch, heads, pages * page_size, size), np.nan)
    rows[:, :, :length] = cache
    by_page = rows.reshape(batch, heads, pages, page_size, size).transpose(0, 2, 3, 1, 4)
    pool = np.full((batch * pages + 1, page_size, heads, size), np.nan)
    for b, row in enumerate(table):
        held = row < batch * pages
        pool[row[held]] = by_page[b, held]
    return pool

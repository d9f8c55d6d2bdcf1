"""Inputs of `kv_cache_update`, and the caches that it leaves."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dflash_plugins.operation import Case, DType
from dflash_plugins.testing.numeric import Array
from dflash_trt.quantization.fp8 import quantize_fp8

KV_SCALES = np.array([0.03, 0.007], np.float32)


def make_inputs(case: Case, starts: Sequence[int], seed: int = 0) -> dict[str, Array]:
    """Random tensors for `case`: sequence b's rows begin at position starts[b]."""
    generator = np.random.default_rng(seed)
    rows = case.inputs["k"].shape[2]
    inputs: dict[str, Array] = {}
    for name in case.operation.inputs:
        spec = case.inputs[name]
        inputs[name] = generator.standard_normal(spec.shape).astype(spec.dtype.numpy)
    inputs["positions"] = np.array(starts, np.int64)[:, None] + np.arange(rows)
    if "page_table" in inputs:
        shape = case.inputs["page_table"].shape
        pages = generator.permutation(case.inputs["k_cache"].shape[0])
        inputs["page_table"] = pages[: shape[0] * shape[1]].reshape(shape).astype(np.int32)
    if "kv_scales" in inputs:
        inputs["kv_scales"] = KV_SCALES
    return inputs


def update(inputs: dict[str, Array]) -> tuple[Array, Array]:
    """Both caches afterwards, of their own type: every bit is defined."""
    k_cache, v_cache = (
        _write(inputs, f"{name}_cache", _stored(inputs, name, index))
        for index, name in enumerate("kv")
    )
    return k_cache, v_cache


def _stored(inputs: dict[str, Array], name: str, index: int) -> Array:
    """Rows [B,H_kv,S,D] as the cache has them."""
    rows = inputs[name]
    if "kv_scales" not in inputs:
        return rows
    codes = quantize_fp8(rows.astype(np.float32), inputs["kv_scales"][index])
    return codes.view(DType.FLOAT8.numpy)


def _write(inputs: dict[str, Array], name: str, rows: Array) -> Array:
    cache: Array = inputs[name].copy()
    for b, s in np.ndindex(inputs["positions"].shape):
        position = int(inputs["positions"][b, s])
        if "page_table" not in inputs:
            if 0 <= position < cache.shape[2]:
                cache[b, :, position] = rows[b, :, s]
            continue
        size, table = cache.shape[1], inputs["page_table"][b]
        if 0 <= position < size * len(table) and table[position // size] >= 0:
            cache[table[position // size], position % size] = rows[b, :, s]
    return cache

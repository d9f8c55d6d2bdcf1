"""Inputs of `kv_feature_injection`, and what it makes of them in float64."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dflash_plugins.operation import Case, DType
from dflash_plugins.testing.numeric import Array
from dflash_trt.quantization.formats import encode_e4m3

KV_SCALES = np.array([0.03, 0.007], np.float32)


def make_inputs(case: Case, starts: Sequence[int], seed: int = 0) -> dict[str, Array]:
    """Random tensors for `case`: sequence b's rows begin at position starts[b]."""
    generator = np.random.default_rng(seed)
    rows = case.inputs["k"].shape[1]
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


def inject(case: Case, inputs: dict[str, Array]) -> tuple[Array, Array]:
    """Both caches afterwards; k and v in float64, rounded only where the function's body rounds."""
    narrow = case.inputs["k"].dtype.numpy
    k, v = (inputs[name].astype(np.float64) for name in "kv")
    half = k.shape[-1] // 2
    norm = 1 / np.sqrt((k**2).mean(-1, keepdims=True) + case.attributes["epsilon"])
    k = k * norm * inputs["k_norm"].astype(np.float64)
    if case.inputs["k"].dtype is not DType.FLOAT32:
        k = k.astype(narrow).astype(np.float64)
    positions = np.maximum(inputs["positions"], 0)
    cos, sin = (inputs[name].astype(np.float64)[positions][:, :, None] for name in ("cos", "sin"))
    near, far = k[..., :half], k[..., half:]
    k = np.concatenate([near * cos - far * sin, far * cos + near * sin], axis=-1)
    k_cache, v_cache = (
        _write(inputs, name, rows.astype(narrow).astype(np.float32) / scale)
        if "kv_scales" in inputs
        else _write(inputs, name, rows)
        for name, rows, scale in zip(("k_cache", "v_cache"), (k, v), KV_SCALES, strict=True)
    )
    return k_cache, v_cache


def _write(inputs: dict[str, Array], name: str, rows: Array) -> Array:
    """A cache in float64 with rows [B,S,H_kv,D] where they belong; FP8 codes as their values."""
    cache: Array = inputs[name].astype(np.float64)
    if "kv_scales" in inputs:
        rows = encode_e4m3(rows).view(DType.FLOAT8.numpy).astype(np.float64)
    for b, s in np.ndindex(rows.shape[:2]):
        position = int(inputs["positions"][b, s])
        if "page_table" not in inputs:
            if 0 <= position < cache.shape[2]:
                cache[b, :, position] = rows[b, s]
            continue
        size, table = cache.shape[1], inputs["page_table"][b]
        if 0 <= position < size * len(table) and table[position // size] >= 0:
            cache[table[position // size], position % size] = rows[b, s]
    return cache

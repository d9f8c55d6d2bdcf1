"""Inputs and expected caches of the operations that write K and V rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from dflash_plugins.operation import Case
from dflash_plugins.testing.gpu import Point
from dflash_plugins.testing.numeric import Array

KV_SCALES = np.array([0.03, 0.007], np.float32)

CHECKED_HEADS = ((8, 128), (8, 64), (2, 256), (3, 80))
"""(KV heads, head size) that are checked on a GPU."""

MEASURED_LENGTH = 4096
"""Cache positions in a time measurement; the last rows of them are written."""


def make_inputs(case: Case, starts: Sequence[int] | None = None) -> dict[str, Array]:
    """Random tensors for `case`: sequence b's rows begin at position starts[b].

    With `starts` None they are the last positions of MEASURED_LENGTH.
    """
    generator = np.random.default_rng(0)
    inputs: dict[str, Array] = {}
    for name in case.operation.inputs:
        spec = case.inputs[name]
        inputs[name] = generator.standard_normal(spec.shape).astype(spec.dtype.numpy)
    batch, rows = inputs["positions"].shape
    first = [MEASURED_LENGTH - rows] * batch if starts is None else starts
    inputs["positions"] = np.array(first, np.int64)[:, None] + np.arange(rows)
    if "page_table" in inputs:
        shape = case.inputs["page_table"].shape
        pages = generator.permutation(case.inputs["k_cache"].shape[0])
        inputs["page_table"] = pages[: shape[0] * shape[1]].reshape(shape).astype(np.int32)
    if "kv_scales" in inputs:
        inputs["kv_scales"] = KV_SCALES
    return inputs


def write_rows(inputs: dict[str, Array], cache: Array, rows: Array) -> Array:
    """A copy of `cache` with rows [B,S,H_kv,D] at `inputs`' positions; outside ones are dropped."""
    cache = cache.copy()
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


def write_points(cases: Sequence[Case]) -> list[Point]:
    """What is measured: k and v are read once and written once."""
    found = []
    for case in cases:
        k, cache = case.inputs["k"], case.inputs["k_cache"]
        moved = 2 * (k.nbytes + replace(k, dtype=cache.dtype).nbytes)
        found.append(Point([case], partial(make_inputs, case), moved))
    return found

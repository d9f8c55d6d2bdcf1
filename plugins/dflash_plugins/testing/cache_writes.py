"""Inputs and expected caches of the operations that write K and V rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from dflash_plugins.kv_caches import WriteShape
from dflash_plugins.operation import Case, DType
from dflash_plugins.testing.gpu import Point
from dflash_plugins.testing.numeric import Array, fill

MEASURED_LENGTH = 4096
"""Cache positions in a time measurement; the last rows of them are written."""


def make_inputs(case: Case, starts: Sequence[int] | None = None) -> dict[str, Array]:
    """Random tensors for `case`: sequence b's rows begin at position starts[b].

    With `starts` None they are the last positions of MEASURED_LENGTH.
    """
    inputs = fill({name: case.inputs[name] for name in case.operation.inputs})
    batch, rows = case.inputs["positions"].shape
    first = [MEASURED_LENGTH - rows] * batch if starts is None else starts
    return inputs | {"positions": np.array(first, np.int64)[:, None] + np.arange(rows)}


def checked_shapes(
    layouts: Iterable[tuple[DType, DType, int | None]], sizes: Sequence[int], length: int
) -> list[WriteShape]:
    """Writes of each of `sizes` rows for four sequences; a layout is types of rows and cache, and
    the page size."""
    return [
        WriteShape(
            compute=compute,
            cache=cache,
            batch=4,
            rows=rows,
            kv_heads=heads,
            head_dim=head_dim,
            length=length,
            page_size=page_size,
        )
        for compute, cache, page_size in layouts
        for heads, head_dim in ((8, 128), (8, 64), (2, 256), (3, 80))
        for rows in sizes
    ]


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

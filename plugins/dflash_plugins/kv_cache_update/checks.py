"""The check of `kv_cache_update` on a GPU: every bit, FP8 codes included, and times."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from dflash_plugins.kv_cache_update.launch import LAYOUTS, make_case
from dflash_plugins.kv_caches import WriteShape, public_cases
from dflash_plugins.operation import Case, DType
from dflash_plugins.testing.cache_writes import (
    CHECKED_HEADS,
    MEASURED_LENGTH,
    make_inputs,
    write_points,
    write_rows,
)
from dflash_plugins.testing.gpu import Point
from dflash_plugins.testing.guarded import Run
from dflash_plugins.testing.numeric import (
    Accuracy,
    Array,
    assert_same_bits,
    attempt,
    relative_error,
    spread,
)
from dflash_trt.quantization.codecs import quantize_fp8

CHECKED_LAYOUTS = [
    (DType.FLOAT32, DType.FLOAT32, 32),
    (DType.FLOAT16, DType.FLOAT16, 32),
    (DType.BFLOAT16, DType.BFLOAT16, 24),
    (DType.BFLOAT16, DType.FLOAT8, None),
    (DType.BFLOAT16, DType.FLOAT8, 32),
    (DType.FLOAT16, DType.FLOAT8, None),
    (DType.FLOAT16, DType.FLOAT8, 24),
]
"""Element type of the rows, that of the cache, and the page size (None: linear)."""


def update(inputs: dict[str, Array]) -> list[Array]:
    """The expected K and V caches, in their own type and to the bit."""
    caches = []
    for index, name in enumerate("kv"):
        rows = inputs[name].swapaxes(1, 2)
        if "kv_scales" in inputs:
            codes = quantize_fp8(rows.astype(np.float32), inputs["kv_scales"][index])
            rows = codes.view(DType.FLOAT8.numpy)
        caches.append(write_rows(inputs, inputs[f"{name}_cache"], rows))
    return caches


def accuracy_cases() -> list[tuple[Case, list[int]]]:
    """Verify steps and prefill chunks, each with the sequences' first positions.

    They cross page borders, begin before position 0, and end past the cache.
    """
    found = []
    for compute, cache, page_size in CHECKED_LAYOUTS:
        pages = f", pages of {page_size}" if page_size else ""
        for heads, size in CHECKED_HEADS:
            name = f"{compute.kernel_name} {cache.kernel_name} cache, {heads} × {size}"
            for rows, starts in ((16, [0, 17, 240, 250]), (300, [0, 3, -5, 100])):
                shape = WriteShape(
                    compute=compute,
                    cache=cache,
                    batch=4,
                    rows=rows,
                    kv_heads=heads,
                    head_dim=size,
                    length=264,
                    page_size=page_size,
                )
                found.append((make_case(f"{name}, {rows} rows{pages}", shape), starts))
    return found


def check_accuracy(run: Run) -> Iterator[Accuracy]:
    """The results for K and V of every case."""
    for case, starts in spread(accuracy_cases()):
        yield from attempt(f"kv_cache_update, {case.name}", partial(check_case, run, case, starts))


def check_case(run: Run, case: Case, starts: list[int]) -> list[Accuracy]:
    """The results for K and V; v gets infinities, NaN, and values that FP8 clips or rounds to 0."""
    inputs = make_inputs(case, starts)
    hostile = [np.inf, -np.inf, np.nan, 1e4, -0.0, 2.0**-24]
    inputs["v"][:, :, 0, : len(hostile)] = hostile
    outputs = run(case.operation.name, inputs, case.attributes)
    return [
        _judge(f"kv_cache_update, {case.name}, {name}", outputs[name], expected)
        for name, expected in zip(outputs, update(inputs), strict=True)
    ]


def _judge(name: str, actual: Array, expected: Array) -> Accuracy:
    mismatch = None
    try:
        assert_same_bits(actual, expected)
    except AssertionError as difference:
        mismatch = str(difference)
    error = float(np.max(relative_error(actual, expected), initial=0.0))
    return Accuracy(name, error, 0.0, mismatch)


ROWS = ((1, 16), (8, 16), (64, 16), (1, 512), (1, 2048))
"""(Sequences, rows of each): three verify steps and two prefill chunks."""


def points() -> list[Point]:
    """The heads of public pairs, in every form of caches."""
    label = "{pair} {cache}{paged}, {batch} × {rows} rows"
    return write_points(public_cases(make_case, LAYOUTS, ROWS, MEASURED_LENGTH, label))

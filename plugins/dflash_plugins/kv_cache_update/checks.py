"""The check of `kv_cache_update` on a GPU: every bit, FP8 codes included, and times."""

from __future__ import annotations

from functools import partial

import numpy as np

from dflash_plugins.kv_cache_update.launch import LAYOUTS, make_case
from dflash_plugins.kv_caches import WriteShape, public_cases
from dflash_plugins.operation import DType
from dflash_plugins.testing.cache_writes import (
    MEASURED_LENGTH,
    checked_shapes,
    make_inputs,
    write_points,
    write_rows,
)
from dflash_plugins.testing.gpu import Point
from dflash_plugins.testing.numeric import Accuracy, Array, Check, Run, exact, find_other_bits
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


def checks() -> list[Check]:
    """Verify steps and prefill chunks: they cross page borders, begin before position 0, and end
    past the cache."""
    found = []
    for shape in checked_shapes(CHECKED_LAYOUTS, (16, 300), 264):
        starts = [0, 17, 240, 250] if shape.rows == 16 else [0, 3, -5, 100]
        found.append(Check(f"kv_cache_update, {shape}", partial(check_shape, shape, starts)))
    return found


def check_shape(shape: WriteShape, starts: list[int], run: Run) -> list[Accuracy]:
    """The results for K and V; v gets infinities, NaN, and values that FP8 clips or rounds to 0."""
    case = make_case(shape)
    inputs = make_inputs(case, starts)
    hostile = [np.inf, -np.inf, np.nan, 1e4, -0.0, 2.0**-24]
    inputs["v"][:, :, 0, : len(hostile)] = hostile
    outputs = run(case.operation.name, inputs, case.attributes)
    found = []
    for name, expected in zip(outputs, update(inputs), strict=True):
        mismatch = find_other_bits(outputs[name], expected)
        found.append(exact(f"kv_cache_update, {shape}, {name}", [mismatch] if mismatch else []))
    return found


ROWS = ((1, 16), (8, 16), (64, 16), (1, 512), (1, 2048))
"""(Sequences, rows of each): three verify steps and two prefill chunks."""


def points() -> list[Point]:
    """The heads of public pairs, in every form of caches."""
    return write_points(public_cases(make_case, LAYOUTS, ROWS, MEASURED_LENGTH))

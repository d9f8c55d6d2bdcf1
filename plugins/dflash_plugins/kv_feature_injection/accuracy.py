"""What `kv_feature_injection` must get right on a GPU: bfloat16 and FP8 stores included."""

from __future__ import annotations

import numpy as np

from dflash_plugins.kv_caches import WriteShape
from dflash_plugins.kv_feature_injection.launch import make_case
from dflash_plugins.kv_feature_injection.reference import error_bound, inject
from dflash_plugins.operation import DType
from dflash_plugins.testing.cache_writes import CHECKED_HEADS, make_inputs
from dflash_plugins.testing.guarded import Run
from dflash_plugins.testing.numeric import Accuracy, Array, epsilon, judge

CODE = 2 * epsilon(DType.FLOAT8.numpy)
"""From an E4M3 code to its neighbour, which k may have where it was rounded before it."""

CACHES = [
    (DType.FLOAT32, DType.FLOAT32),
    (DType.FLOAT16, DType.FLOAT16),
    (DType.BFLOAT16, DType.BFLOAT16),
    (DType.BFLOAT16, DType.FLOAT8),
    (DType.FLOAT16, DType.FLOAT8),
]
"""Type of the rows and of the cache."""


def check_accuracy(run: Run) -> list[Accuracy]:
    """Every layout and type against float64, at cache and page borders; v's rows to the bit."""
    shapes = [
        WriteShape(
            compute=compute,
            cache=cache,
            batch=4,
            rows=16,
            kv_heads=heads,
            head_dim=size,
            length=256,
            page_size=page_size,
        )
        for compute, cache in CACHES
        for heads, size in CHECKED_HEADS
        for page_size in (None, 32)
    ]
    return [one for shape in shapes for one in check_shape(run, shape)]


def check_shape(run: Run, shape: WriteShape) -> list[Accuracy]:
    """The verdict on K and on V."""
    cache = shape.cache or shape.compute
    name = f"{shape.compute.kernel_name} {cache.kernel_name} cache"
    paged = " paged" if shape.page_size else ""
    case = make_case(f"{name}, {shape.kv_heads} × {shape.head_dim}{paged}", shape)
    inputs = make_inputs(case, [0, 24, 100, 240])
    outputs = run(case.operation.name, inputs, case.attributes)
    both = inject(case, inputs)
    is_coded = cache is DType.FLOAT8
    rounded: float | Array = CODE if is_coded else error_bound(case, inputs, both[0])
    return [
        judge(
            f"kv_feature_injection, {case.name}, {written}",
            outputs[written].astype(np.float64),
            expected,
            bound,
        )
        for written, expected, bound in zip(outputs, both, (rounded, 0.0), strict=True)
    ]

"""What `kv_feature_injection` must get right on a GPU: bfloat16 and FP8 stores included."""

from __future__ import annotations

import numpy as np

from dflash_plugins.kv_feature_injection.launch import make_case
from dflash_plugins.kv_feature_injection.reference import inject
from dflash_plugins.operation import DType
from dflash_plugins.testing.cache_writes import make_inputs
from dflash_plugins.testing.guarded import Run
from dflash_plugins.testing.numeric import Accuracy, epsilon, judge

ROUNDINGS = 4
"""Of the type written, that a value may be off: two of k, and one of each rotation's products."""
CACHES = [
    (DType.FLOAT32, DType.FLOAT32),
    (DType.FLOAT16, DType.FLOAT16),
    (DType.BFLOAT16, DType.BFLOAT16),
    (DType.BFLOAT16, DType.FLOAT8),
    (DType.FLOAT16, DType.FLOAT8),
]


def check_accuracy(run: Run) -> list[Accuracy]:
    """Every layout and type against float64, at cache and page borders.

    An E4M3 code may be the neighbour where k's rounding to the input's type was.
    """
    results = []
    for compute, cache in CACHES:
        for heads, size in ((8, 128), (8, 64), (2, 256), (3, 80)):
            for page_size in (None, 32):
                name = f"{compute.kernel_name} {cache.kernel_name} cache, {heads} × {size}"
                case = make_case(
                    f"{name}{' paged' if page_size else ''}",
                    compute=compute,
                    cache=cache,
                    batch=4,
                    rows=16,
                    kv_heads=heads,
                    head_dim=size,
                    length=256,
                    page_size=page_size,
                )
                inputs = make_inputs(case, [0, 24, 100, 240])
                outputs = run(case.operation.name, inputs, case.attributes)
                bound = ROUNDINGS * epsilon(cache.numpy)
                for written, expected in zip(outputs, inject(case, inputs), strict=True):
                    title = f"kv_feature_injection, {case.name}, {written}"
                    actual = outputs[written].astype(np.float64)
                    results.append(judge(title, actual, expected, bound))
    return results

"""The operations of `kv_cache_update`: `_paged`, `_fp8` and `_paged_fp8`.

There is no plain form: TensorRT's own cache update writes linear caches of the compute type.
"""

from __future__ import annotations

from dflash_plugins.kv_caches import WriteShape, public_cases, write_operations
from dflash_plugins.operation import Case, DType, TensorSpec
from dflash_trt.core.limits import PAGE_SIZE

LAYOUTS = ((DType.BFLOAT16, PAGE_SIZE), (DType.FLOAT8, None), (DType.FLOAT8, PAGE_SIZE))
"""Element type and page size of the caches of each form."""

OPERATIONS = write_operations("kv_cache_update", ("k", "v", "positions"), LAYOUTS)


def make_case(shape: WriteShape) -> Case:
    """The form of the operation for `shape`, with k and v [B,H_kv,S,D]."""
    rows = TensorSpec(shape.compute, (shape.batch, shape.kv_heads, shape.rows, shape.head_dim))
    return shape.case(OPERATIONS, {"k": rows, "v": rows})


def main_cases() -> list[Case]:
    """Verify steps with the KV heads of public pairs."""
    return public_cases(make_case, LAYOUTS, [(8, 16)], 8192)

"""How `kv_cache_update` is launched.

Operations: `_paged`, `_fp8` and both. Linear caches of the compute type have TensorRT's own update.
"""

from __future__ import annotations

from dflash_plugins.kv_caches import PAGE_SIZE, WriteShape, public_cases, write_operations
from dflash_plugins.operation import Case, DType, TensorSpec

LAYOUTS = ((DType.BFLOAT16, PAGE_SIZE), (DType.FLOAT8, None), (DType.FLOAT8, PAGE_SIZE))
"""Type and page size of every cache that the operation has a form for."""

OPERATIONS = write_operations("kv_cache_update", ("k", "v", "positions"), LAYOUTS)


def make_case(name: str, shape: WriteShape) -> Case:
    """The operation at `shape`."""
    rows = TensorSpec(shape.compute, (shape.batch, shape.kv_heads, shape.rows, shape.head_dim))
    return shape.case(name, OPERATIONS, {"k": rows, "v": rows})


def main_cases() -> list[Case]:
    """The KV heads of Qwen3-8B and Llama-3.1-8B (8 of 128) and of gpt-oss (8 of 64)."""
    return public_cases(make_case, LAYOUTS, [(8, 16)], 8192, "{pair} {cache} cache{paged}")

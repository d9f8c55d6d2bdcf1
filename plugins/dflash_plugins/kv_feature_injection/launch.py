"""How `kv_feature_injection` is launched. Operations: plain, `_paged`, `_fp8` and both."""

from __future__ import annotations

from itertools import product

from dflash_plugins.kv_caches import PAGE_SIZE, WriteShape, public_cases, write_operations
from dflash_plugins.operation import Case, DType, TensorSpec

LAYOUTS = tuple(product((DType.BFLOAT16, DType.FLOAT8), (None, PAGE_SIZE)))
"""Type and page size of every cache that the operation has a form for."""

EPSILON = 1e-6
"""Of k_norm, in public drafts."""

OPERATIONS = write_operations(
    "kv_feature_injection",
    ("k", "v", "k_norm", "cos", "sin", "positions"),
    LAYOUTS,
    {"epsilon": float},
)


def make_case(name: str, shape: WriteShape) -> Case:
    """The operation at `shape`; its RoPE tables are as long as the caches."""
    rows = TensorSpec(shape.compute, (shape.batch, shape.rows, shape.kv_heads, shape.head_dim))
    table = TensorSpec(shape.compute, (shape.length, shape.head_dim // 2))
    norm = TensorSpec(DType.FLOAT32, (shape.head_dim,))
    inputs = {"k": rows, "v": rows, "k_norm": norm, "cos": table, "sin": table}
    return shape.case(name, OPERATIONS, inputs, epsilon=EPSILON)


def main_cases() -> list[Case]:
    """The drafts of Qwen3-8B (8 KV heads of 128) and gpt-oss (8 of 64)."""
    return public_cases(make_case, LAYOUTS, [(8, 8)], 8192, "{pair} {cache} cache{paged}")

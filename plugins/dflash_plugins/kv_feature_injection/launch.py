"""The operations of `kv_feature_injection`: plain, `_paged`, `_fp8` and `_paged_fp8`."""

from __future__ import annotations

from itertools import product

from dflash_plugins.kv_caches import WriteShape, public_cases, write_operations
from dflash_plugins.operation import Case, DType, TensorSpec
from dflash_trt.core.limits import PAGE_SIZE

LAYOUTS = tuple(product((DType.BFLOAT16, DType.FLOAT8), (None, PAGE_SIZE)))
"""Element type and page size of the caches of each form."""

EPSILON = 1e-6
"""k_norm's epsilon in public drafts."""

OPERATIONS = write_operations(
    "kv_feature_injection",
    ("k", "v", "k_norm", "cos", "sin", "positions"),
    LAYOUTS,
    {"epsilon": float},
)


def make_case(shape: WriteShape) -> Case:
    """The form of the operation for `shape`; RoPE tables are as long as the caches."""
    rows = TensorSpec(shape.compute, (shape.batch, shape.rows, shape.kv_heads, shape.head_dim))
    table = TensorSpec(shape.compute, (shape.length, shape.head_dim // 2))
    norm = TensorSpec(DType.FLOAT32, (shape.head_dim,))
    inputs = {"k": rows, "v": rows, "k_norm": norm, "cos": table, "sin": table}
    return shape.case(OPERATIONS, inputs, epsilon=EPSILON)


def main_cases() -> list[Case]:
    """Verify steps with the drafts of Qwen3-8B (8 KV heads × 128) and gpt-oss (8 × 64)."""
    return public_cases(make_case, LAYOUTS, [(8, 8)], 8192)

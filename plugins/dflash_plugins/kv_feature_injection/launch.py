"""How `kv_feature_injection` is launched. Operations: plain, `_paged`, `_fp8` and both."""

from __future__ import annotations

from itertools import product

from dflash_plugins.kv_caches import (
    PAGE_SIZE,
    WriteShape,
    launch_write,
    public_cases,
    write_operations,
)
from dflash_plugins.operation import Attributes, Case, DType, Launch, Specs, TensorSpec

LAYOUTS = tuple(product((DType.BFLOAT16, DType.FLOAT8), (None, PAGE_SIZE)))
"""Type and page size of every cache that the operation has a form for."""

EPSILON = 1e-6
"""Of k_norm, in public drafts."""


def _launch(specs: Specs, attributes: Attributes, tactic: int) -> Launch:
    epsilon = float(attributes["epsilon"])
    return launch_write(specs, attributes, specs["k"].shape, EPSILON=epsilon)


OPERATIONS = write_operations(
    "kv_feature_injection",
    ("k", "v", "k_norm", "cos", "sin", "positions"),
    _launch,
    LAYOUTS,
    {"epsilon": float},
)


def make_case(name: str, shape: WriteShape) -> Case:
    """The operation at `shape`; its RoPE tables are as long as the caches."""
    rows = TensorSpec(shape.compute, (shape.batch, shape.rows, shape.kv_heads, shape.head_dim))
    table = TensorSpec(shape.compute, (shape.length, shape.head_dim // 2))
    specs = {
        "k": rows,
        "v": rows,
        "k_norm": TensorSpec(DType.FLOAT32, (shape.head_dim,)),
        "cos": table,
        "sin": table,
        "positions": TensorSpec(DType.INT64, (shape.batch, shape.rows)),
        **shape.cache_specs,
    }
    operation = next(one for one in OPERATIONS if set(one.inputs) == set(specs))
    return Case(name, operation, specs, {"epsilon": EPSILON, **shape.attributes})


def main_cases() -> list[Case]:
    """The drafts of Qwen3-8B (8 KV heads of 128) and gpt-oss (8 of 64)."""
    return public_cases(make_case, LAYOUTS, [(8, 8)], 8192, "{pair} {cache} cache{paged}")

"""How `kv_cache_update` is launched.

Operations: `_paged`, `_fp8` and both. Linear caches of the compute type have TensorRT's own update.
"""

from __future__ import annotations

from dflash_plugins.kv_caches import (
    PAGE_SIZE,
    WriteShape,
    launch_write,
    public_cases,
    write_operations,
)
from dflash_plugins.operation import Attributes, Case, DType, Launch, Specs, TensorSpec

LAYOUTS = ((DType.BFLOAT16, PAGE_SIZE), (DType.FLOAT8, None), (DType.FLOAT8, PAGE_SIZE))
"""Type and page size of every cache that the operation has a form for."""


def _launch(specs: Specs, attributes: Attributes, tactic: int) -> Launch:
    batch, kv_heads, rows, head_dim = specs["k"].shape
    return launch_write(specs, attributes, (batch, rows, kv_heads, head_dim))


OPERATIONS = write_operations("kv_cache_update", ("k", "v", "positions"), _launch, LAYOUTS)


def make_case(name: str, shape: WriteShape) -> Case:
    """The operation at `shape`."""
    rows = TensorSpec(shape.compute, (shape.batch, shape.kv_heads, shape.rows, shape.head_dim))
    positions = TensorSpec(DType.INT64, (shape.batch, shape.rows))
    specs = {"k": rows, "v": rows, "positions": positions} | shape.cache_specs
    operation = next(one for one in OPERATIONS if set(one.inputs) == set(specs))
    return Case(name, operation, specs, shape.attributes)


def main_cases() -> list[Case]:
    """The KV heads of Qwen3-8B and Llama-3.1-8B (8 of 128) and of gpt-oss (8 of 64)."""
    return public_cases(make_case, LAYOUTS, [(8, 16)], 8192, "{pair} {cache} cache{paged}")

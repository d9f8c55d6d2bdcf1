"""How `kv_feature_injection` is launched, for each cache layout and type of element.

Operations: plain, `_paged` (pool and page table), `_fp8` (a cache of E4M3 codes, with the scales
of K and V as one float32 [2]) and both.
"""

from __future__ import annotations

from itertools import product

from dflash_plugins.cache_writes import (
    PAGE_SIZE,
    cache_constants,
    cache_specs,
    public_cases,
    write_operation,
)
from dflash_plugins.operation import (
    Attributes,
    Case,
    Constant,
    DType,
    Launch,
    Specs,
    TensorSpec,
    fixed,
    next_power_of_two,
)

# Elements that one program normalises: enough bytes in flight, no more registers than needed.
TILE = 1024

LAYOUTS = tuple(product((DType.BFLOAT16, DType.FLOAT8), (None, PAGE_SIZE)))
"""Type and page size of every cache that the operation has a form for."""


def _launch(
    is_paged: bool, is_quantized: bool, specs: Specs, attributes: Attributes, tactic: int
) -> Launch:
    batch, rows, kv_heads, head_dim = specs["k"].shape
    heads, size = fixed(kv_heads, "the number of KV heads"), fixed(head_dim, "the head size")
    half = next_power_of_two(size // 2)
    per_program = min(next_power_of_two(heads), max(1, TILE // (2 * half)))
    limit = specs["page_table"].shape[1] if is_paged else specs["k_cache"].shape[2]
    constants: dict[str, Constant] = {
        "EPSILON": float(attributes["epsilon"]),
        "KV_HEADS": heads,
        "HEAD_DIM": size,
        "HEADS": per_program,
        "HALF_BLOCK": half,
    }
    constants |= cache_constants(attributes, is_paged=is_paged, is_quantized=is_quantized)
    return Launch(
        grid=(batch * rows, -(-heads // per_program), 1),
        extras=(rows, limit),
        constants=constants,
        warps=max(1, min(4, per_program * half // 128)),
        stages=1,
    )


OPERATIONS = tuple(
    write_operation(
        "kv_feature_injection",
        ("k", "v", "k_norm", "cos", "sin", "positions"),
        {"epsilon": float},
        _launch,
        is_paged=is_paged,
        is_quantized=is_quantized,
    )
    for is_quantized in (False, True)
    for is_paged in (False, True)
)


def make_case(
    name: str,
    *,
    compute: DType,
    cache: DType | None = None,
    batch: int,
    rows: int,
    kv_heads: int,
    head_dim: int,
    length: int,
    page_size: int | None = None,
    pages: int | None = None,
    epsilon: float = 1e-6,
) -> Case:
    """A case over caches of `length` positions; `page_size` makes them paged, of `pages` pages."""
    half = TensorSpec(compute, (length, head_dim // 2))
    activations = TensorSpec(compute, (batch, rows, kv_heads, head_dim))
    specs = {
        "k": activations,
        "v": activations,
        "k_norm": TensorSpec(DType.FLOAT32, (head_dim,)),
        "cos": half,
        "sin": half,
        "positions": TensorSpec(DType.INT64, (batch, rows)),
    }
    specs |= cache_specs(
        cache or compute,
        batch=batch,
        kv_heads=kv_heads,
        head_dim=head_dim,
        length=length,
        page_size=page_size,
        pages=pages,
    )
    by_inputs = {frozenset(operation.inputs): operation for operation in OPERATIONS}
    attributes = {"epsilon": epsilon} | ({} if page_size is None else {"page_size": page_size})
    return Case(name, by_inputs[frozenset(specs)], specs, attributes)


def main_cases() -> list[Case]:
    """The drafts of Qwen3-8B (8 KV heads of 128) and gpt-oss (8 of 64)."""
    label = "{pair} {cache} cache{paged}"
    return public_cases(make_case, LAYOUTS, [(8, 8)], length=8192, label=label)

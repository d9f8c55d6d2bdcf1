"""How `kv_cache_update` is launched, for each cache layout and type of element.

Operations: `_paged` (pool and page table), `_fp8` (a cache of E4M3 codes, with the scales of K and
V as one float32 [2]) and both. Linear caches of the compute type have TensorRT's own update.
"""

from __future__ import annotations

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

# Elements of K, and of V, that one program writes: 16 bytes of each for every thread.
TILE = 1024

LAYOUTS = ((DType.BFLOAT16, PAGE_SIZE), (DType.FLOAT8, None), (DType.FLOAT8, PAGE_SIZE))
"""Type and page size of every cache that the operation has a form for."""


def _launch(
    is_paged: bool, is_quantized: bool, specs: Specs, attributes: Attributes, tactic: int
) -> Launch:
    batch, kv_heads, rows, head_dim = specs["k"].shape
    heads, size = fixed(kv_heads, "the number of KV heads"), fixed(head_dim, "the head size")
    block = next_power_of_two(size)
    per_program = min(next_power_of_two(heads), max(1, TILE // block))
    limit = specs["page_table"].shape[1] if is_paged else specs["k_cache"].shape[2]
    constants: dict[str, Constant] = {
        "KV_HEADS": heads,
        "HEAD_DIM": size,
        "HEADS": per_program,
        "D_BLOCK": block,
    }
    constants |= cache_constants(attributes, is_paged=is_paged, is_quantized=is_quantized)
    return Launch(
        grid=(batch * rows, -(-heads // per_program), 1),
        extras=(rows, limit),
        constants=constants,
        warps=max(1, min(4, per_program * block // 256)),
        stages=1,
    )


OPERATIONS = tuple(
    write_operation(
        "kv_cache_update",
        ("k", "v", "positions"),
        {},
        _launch,
        is_paged=is_paged,
        is_quantized=is_quantized,
    )
    for is_paged, is_quantized in ((True, False), (False, True), (True, True))
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
) -> Case:
    """A case over caches of `length` positions; `page_size` makes them paged, of `pages` pages."""
    activations = TensorSpec(compute, (batch, kv_heads, rows, head_dim))
    specs = {
        "k": activations,
        "v": activations,
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
    operation = next(one for one in OPERATIONS if set(one.inputs) == set(specs))
    return Case(name, operation, specs, {} if page_size is None else {"page_size": page_size})


def main_cases() -> list[Case]:
    """The KV heads of Qwen3-8B and Llama-3.1-8B (8 of 128) and of gpt-oss (8 of 64)."""
    label = "{pair} {cache} cache{paged}"
    return public_cases(make_case, LAYOUTS, [(8, 16)], length=8192, label=label)

"""What operations that write a layer's K and V rows into its caches have in common.

They have a form for each cache layout and type of element: plain (linear, of the compute type),
`_paged` (pool and page table), `_fp8` (codes of E4M3, with the scales of K and V as one float32
[2]) and both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from dflash_plugins.operation import (
    Attributes,
    Case,
    Constant,
    DType,
    Launch,
    Operation,
    Specs,
    TensorSpec,
)

PUBLIC_HEAD_DIMS = {"qwen3-8b": 128, "gpt-oss": 64}
"""Head sizes of public pairs, target and draft alike; all have 8 KV heads."""

PAGE_SIZE = 32

WriteLaunch = Callable[[bool, bool, Specs, Attributes, int], Launch]
"""A launch computation, of (is_paged, is_quantized) and what every operation's takes."""


def write_operation(
    name: str,
    inputs: Sequence[str],
    attributes: dict[str, type],
    launch: WriteLaunch,
    *,
    is_paged: bool,
    is_quantized: bool,
) -> Operation:
    """One form of the operation `name`; its caches follow `inputs`, and leave as they came."""
    caches = [*["page_table"] * is_paged, "k_cache", "v_cache", *["kv_scales"] * is_quantized]
    return Operation(
        name=f"{name}{'_paged' * is_paged}{'_fp8' * is_quantized}",
        kernel=name,
        inputs=(*inputs, *caches),
        extras=("rows", "limit"),
        outputs=("k_cache_out", "v_cache_out"),
        aliases={"k_cache_out": "k_cache", "v_cache_out": "v_cache"},
        attributes=attributes | ({"page_size": int} if is_paged else {}),
        launch=partial(launch, is_paged, is_quantized),
    )


def cache_constants(
    attributes: Attributes, *, is_paged: bool, is_quantized: bool
) -> dict[str, Constant]:
    """The page size, 0 where there are no pages, and None for inputs that the form has not."""
    constants: dict[str, Constant] = {"PAGE_SIZE": int(attributes["page_size"]) if is_paged else 0}
    if not is_paged:
        constants["page_table"] = None
    if not is_quantized:
        constants["kv_scales"] = None
    return constants


def cache_specs(
    dtype: DType,
    *,
    batch: int,
    kv_heads: int,
    head_dim: int,
    length: int,
    page_size: int | None,
    pages: int | None,
) -> dict[str, TensorSpec]:
    """A case's caches of `length` positions; `page_size` makes them paged, of `pages` pages."""
    specs: dict[str, TensorSpec] = {}
    shape = (batch, kv_heads, length, head_dim)
    if page_size is not None:
        per_sequence = -(-length // page_size)
        shape = (pages or batch * per_sequence, page_size, kv_heads, head_dim)
        specs["page_table"] = TensorSpec(DType.INT32, (batch, per_sequence))
    specs["k_cache"] = specs["v_cache"] = TensorSpec(dtype, shape)
    if dtype is DType.FLOAT8:
        specs["kv_scales"] = TensorSpec(DType.FLOAT32, (2,))
    return specs


def public_cases(
    make_case: Callable[..., Case],
    layouts: Iterable[tuple[DType, int | None]],
    sizes: Sequence[tuple[int, int]],
    *,
    length: int,
    label: str,
) -> list[Case]:
    """Cases of public pairs: their heads, over every layout (type, page size), at every size.

    `sizes` are sequences and rows of each; `label` names a case by pair, cache, pages and size.
    """
    return [
        make_case(
            label.format(
                pair=pair,
                cache=cache.kernel_name,
                paged=" paged" if page_size else "",
                batch=batch,
                rows=rows,
            ),
            compute=DType.BFLOAT16,
            cache=cache,
            batch=batch,
            rows=rows,
            kv_heads=8,
            head_dim=head_dim,
            length=length,
            page_size=page_size,
        )
        for pair, head_dim in PUBLIC_HEAD_DIMS.items()
        for cache, page_size in layouts
        for batch, rows in sizes
    ]

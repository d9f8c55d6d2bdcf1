"""The forms of KV caches, and the shared code of the operations that write rows into them.

An operation has a form for each layout and element type of the caches: plain (linear, in the
compute type), `_paged` (a page pool and a page table), `_fp8` (E4M3 codes, with the scales of K
and V as one float32 [2]) and `_paged_fp8`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from dflash_plugins.operation import (
    Attributes,
    Case,
    DType,
    Launch,
    Operation,
    Specs,
    TensorSpec,
    fixed,
    next_power_of_two,
)
from dflash_plugins.public import public_pairs

Layout = tuple[DType, int | None]
"""Element type and page size of a cache; a page size of None is the linear layout."""

TILE = 1024
"""Elements of K, and of V, that one program writes at most."""
ITEMS = 8
"""Those that lie side by side and are one thread's: 128 bits of what is not FP8."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteShape:
    """A write of `rows` rows for each of `batch` sequences into caches of `length` positions.

    `cache` is the caches' element type; None is `compute`. `page_size` makes them paged, with
    `pages` pages in the pool; None is as many as all positions need.
    """

    compute: DType = DType.BFLOAT16
    cache: DType | None = None
    batch: int
    rows: int
    kv_heads: int
    head_dim: int
    length: int
    page_size: int | None = None
    pages: int | None = None

    def __str__(self) -> str:
        cache, pages = (self.cache or self.compute).kernel_name, f", pages of {self.page_size}"
        heads = f"{self.kv_heads} × {self.head_dim}, {self.batch} × {self.rows} rows"
        return f"{self.compute.kernel_name} {cache} cache, {heads}{pages * bool(self.page_size)}"

    def case(self, operations: Sequence[Operation], inputs: Specs, **attributes: Any) -> Case:
        """A case of the form in `operations` that takes these caches, positions and `inputs`."""
        sizes = (self.batch, self.kv_heads, self.length, self.head_dim)
        caches = cache_specs(self.cache or self.compute, sizes, self.page_size, self.pages)
        positions = TensorSpec(DType.INT64, (self.batch, self.rows))
        specs = {**inputs, "positions": positions, **caches}
        operation = next(one for one in operations if set(one.inputs) == set(specs))
        paged = {} if self.page_size is None else {"page_size": self.page_size}
        return Case(str(self), operation, specs, attributes | paged)


def form_suffix(*, is_paged: bool, is_quantized: bool) -> str:
    """The suffix of an operation's name for a form of caches; empty for the plain form."""
    return f"{'_paged' * is_paged}{'_fp8' * is_quantized}"


def cache_specs(
    dtype: DType, sizes: tuple[int, int, int, int], page_size: int | None, pages: int | None = None
) -> dict[str, TensorSpec]:
    """K and V caches of `sizes` [B,H_kv,M,D]; paged ones as pools of `pages` pages and a table."""
    specs: dict[str, TensorSpec] = {}
    shape = sizes
    if page_size is not None:
        batch, kv_heads, length, head_dim = sizes
        columns = -(-length // page_size)
        shape = (pages or batch * columns, page_size, kv_heads, head_dim)
        specs["page_table"] = TensorSpec(DType.INT32, (batch, columns))
    specs["k_cache"] = specs["v_cache"] = TensorSpec(dtype, shape)
    if dtype is DType.FLOAT8:
        specs["kv_scales"] = TensorSpec(DType.FLOAT32, (2,))
    return specs


def write_operations(
    name: str,
    inputs: Sequence[str],
    layouts: Iterable[Layout],
    attributes: dict[str, type] | None = None,
) -> tuple[Operation, ...]:
    """The operation `name` for each layout. Caches follow `inputs` and are updated in place."""
    operations = []
    for dtype, page_size in layouts:
        is_paged, is_quantized = page_size is not None, dtype is DType.FLOAT8
        caches = [*["page_table"] * is_paged, "k_cache", "v_cache", *["kv_scales"] * is_quantized]
        operation = Operation(
            name=name + form_suffix(is_paged=is_paged, is_quantized=is_quantized),
            kernel=name,
            inputs=(*inputs, *caches),
            extras=("rows", "limit", *["pages"] * is_paged, *["angles"] * ("cos" in inputs)),
            outputs=("k_cache_out", "v_cache_out"),
            aliases={"k_cache_out": "k_cache", "v_cache_out": "v_cache"},
            attributes=(attributes or {}) | ({"page_size": int} if is_paged else {}),
            launch=_launch_write,
        )
        operations.append(operation)
    return tuple(operations)


def _launch_write(specs: Specs, attributes: Attributes, tactic: int) -> Launch:
    """One program for a row and HEADS of its KV heads; attributes become constants in capitals."""
    is_paged = "page_table" in specs
    batch, rows = specs["positions"].shape
    cache = specs["k_cache"].shape
    heads = fixed(cache[2 if is_paged else 1], "the number of KV heads")
    size = fixed(cache[3], "the head size")
    block = next_power_of_two(size)
    per_program = min(next_power_of_two(heads), max(1, TILE // block))
    has_rope = "cos" in specs
    halves = 2 if has_rope else 1  # RoPE turns a head's halves together
    absent = [name for name in ("page_table", "kv_scales") if name not in specs]
    constants = {
        "KV_HEADS": heads,
        "HEAD_DIM": size,
        "HEADS": per_program,
        "D_BLOCK": block,
        "PAGE_SIZE": 0,
        **({} if is_paged else {"pages": 0}),
        **{name.upper(): value for name, value in attributes.items()},
        **dict.fromkeys(absent),
    }
    return Launch(
        grid=(batch * rows, -(-heads // per_program), 1),
        extras=(
            rows,
            specs["page_table"].shape[1] if is_paged else cache[2],
            *(cache[:1] if is_paged else ()),
            *(specs["cos"].shape[:1] if has_rope else ()),
        ),
        constants=constants,
        warps=max(1, min(4, per_program * block // (32 * ITEMS * halves))),
        stages=1,
    )


def public_cases(
    make_case: Callable[[WriteShape], Case],
    layouts: Iterable[Layout],
    sizes: Sequence[tuple[int, int]],
    length: int,
) -> list[Case]:
    """Cases with the KV heads of public pairs, for every layout and every size.

    `sizes` are (sequences, rows of each).
    """
    cases = []
    for pair, public in public_pairs().items():
        for (cache, page_size), (batch, rows) in product(layouts, sizes):
            shape = WriteShape(
                cache=cache,
                batch=batch,
                rows=rows,
                kv_heads=public.draft.kv_heads,
                head_dim=public.draft.head_dim,
                length=length,
                page_size=page_size,
            )
            cases.append(replace(make_case(shape), name=f"{pair} {shape}"))
    return cases

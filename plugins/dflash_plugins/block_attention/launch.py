"""The operations of `block_attention` and their launches.

`block_attention` is one launch, for short caches and windows. Long ones take two: `_split` writes
a partial result per split of the context, `_merge` combines them. The first two have every form
(`kv_caches.py`). Attributes: block_size, the most rows of a verify step; is_causal, 1 for the
lower-right mask; window, 0 for none; most_splits, the most splits of a row. Tactic 0 gives a
program the rows of one block, tactic 1 as many as registers hold: prefill chunks read K and V less.
Tactic 2 gives it half a block's rows, at most 32: more programs, whose tiles take less time, for
few sequences. Tactic 3 is the floor: 48 KiB of shared memory, which a launcher need not opt in to.
"""

from __future__ import annotations

from functools import partial

from dflash_plugins.kv_caches import form_suffix
from dflash_plugins.operation import (
    Attributes,
    Constant,
    DType,
    Launch,
    Operation,
    Specs,
    TensorSpec,
    fixed,
    next_power_of_two,
)
from dflash_trt.errors import DflashError
from dflash_trt.kernels import attention
from dflash_trt.kernels.attention import Extent

TACTICS = BLOCK, MOST, FEW, FLOOR = range(4)
"""A program has the rows of a block, the most rows, few, or at most what 48 KiB hold."""

MAX_ROWS, MAX_ROW_ELEMENTS = 128, 64 * 256
"""Most query rows of a program, and most elements of them: its float32 sums stay in registers."""

LEAST_ROWS, FEW_ROWS = 16, 32
"""Rows of a product on tensor cores, and of a program that shares its block's with others."""

WHOLE_ROW_ELEMENTS = 32 * 128
"""Of a program that writes the result at once, with heads of 128: 64 rows spill on sm_120a."""

FLOOR_ROW_ELEMENTS = 32 * 128
"""Most elements of the floor's rows: beside 8 KiB of q and 8 of products, 32 KiB of K and V fit."""


def tile_positions(head_dim: int) -> int:
    """Cache positions per iteration of the kernel's loop: at most 16 KiB of K in 16 bits."""
    return min(64, 64 * 128 // head_dim)


def _warps(program_rows: int, head_dim: int, is_paged: bool) -> int:
    """Warps per program, enough that its sums and addresses stay in registers."""
    is_large = program_rows >= 128 or program_rows * head_dim >= (64 if is_paged else 128) * 128
    return 8 if is_large else 4


def _stages(head_dim: int, cache: DType, is_paged: bool) -> int:
    """Software pipeline depth: some 64 KiB of K and V in flight fit every architecture.

    Paged caches get two more, unless there are 5: reading the page table is one more load.
    """
    if head_dim > 128:
        return 4 if is_paged else 2
    tile_bytes = tile_positions(head_dim) * head_dim * cache.numpy.itemsize
    steps = 3 if tile_bytes > 8 * 1024 else 5
    return steps + 2 if is_paged and steps == 3 else steps


def _floor_stages(cache: DType, is_paged: bool) -> int:
    """The floor's pipeline depth: 32 KiB of K and V in flight, one tile of each in 16 bits.

    Paged caches take two steps for a tile: one for its row of the page table.
    """
    tiles = max(1, 2 // cache.numpy.itemsize)
    return 1 + (2 * tiles if is_paged else tiles)


def _capacity(specs: Specs) -> Extent:
    """How many positions the cache of one sequence can hold."""
    if "page_table" in specs:
        return specs["page_table"].shape[1] * fixed(specs["k_cache"].shape[1], "the page size")
    return specs["k_cache"].shape[2]


def _visibility(head_dim: int, attributes: Attributes) -> dict[str, Constant]:
    """The constants that fix a split's positions and the mask; the merge needs the same."""
    return {
        "RUN": attention.RUN,
        "TILE": tile_positions(head_dim),
        "CAUSAL": bool(attributes["is_causal"]),
        "WINDOW": attributes["window"],
    }


def _head_dim(specs: Specs) -> int:
    """The head size; raises DflashError if no kernel has it."""
    head_dim = fixed(specs["q"].shape[3], "the head size")
    if head_dim not in attention.HEAD_DIMS:
        known = ", ".join(map(str, attention.HEAD_DIMS))
        raise DflashError(f"block_attention has no kernel for head size {head_dim}, only {known}")
    return head_dim


def _launch(is_split: bool, specs: Specs, attributes: Attributes, tactic: int) -> Launch:
    batch, heads, rows, _ = specs["q"].shape
    is_paged, head_dim, capacity = "page_table" in specs, _head_dim(specs), _capacity(specs)
    kv_heads = fixed(specs["k_cache"].shape[2 if is_paged else 1], "the number of KV heads")
    query_heads = fixed(heads, "the number of query heads")
    if query_heads % kv_heads:
        raise DflashError(f"{query_heads} query heads do not divide among {kv_heads} KV heads")
    group = query_heads // kv_heads
    splits: Extent = 1
    extras: tuple[Extent, ...] = (rows, capacity)
    if is_split:
        most, block_size = attributes["most_splits"], attributes["block_size"]
        splits = attention.split_count(most, block_size, rows)
        extras = (rows, capacity, splits, attention.share_rows(most, block_size, rows))
    cache, elements = specs["k_cache"].dtype, MAX_ROW_ELEMENTS
    stages = _stages(head_dim, cache, is_paged)
    if not is_split and head_dim == 128:
        elements = WHOLE_ROW_ELEMENTS
    if tactic == FLOOR:
        elements, stages = FLOOR_ROW_ELEMENTS, _floor_stages(cache, is_paged)
    program_rows = min(MAX_ROWS, elements // head_dim)
    if tactic != MOST:
        block_rows = next_power_of_two(group * attributes["block_size"])
        program_rows = min(max(LEAST_ROWS, block_rows), program_rows)
    if tactic == FEW:
        program_rows = max(LEAST_ROWS, min(FEW_ROWS, program_rows // 2))
    row_blocks = (rows * group + (program_rows - 1)) // program_rows
    absent = [name for name in ("page_table", "kv_scales") if name not in specs]
    absent += ["sinks", "attended"] if is_split else ["shares", "log_sums"]
    return Launch(
        grid=(row_blocks * splits, kv_heads, batch),
        extras=extras,
        constants={
            **dict.fromkeys(absent),
            **({} if is_split else {"splits": 1, "share_rows": 0}),
            "GROUP": group,
            "HEAD_DIM": head_dim,
            **_visibility(head_dim, attributes),
            "BLOCK_M": program_rows,
            "PAGE_SIZE": fixed(specs["k_cache"].shape[1], "the page size") if is_paged else 0,
        },
        warps=_warps(program_rows, head_dim, is_paged),
        stages=stages,
    )


def _launch_merge(specs: Specs, attributes: Attributes, tactic: int) -> Launch:
    batch, query_heads, rows, _ = specs["q"].shape
    head_dim = _head_dim(specs)
    splits = attention.split_count(attributes["most_splits"], attributes["block_size"], rows)
    return Launch(
        grid=(rows, query_heads, batch),
        extras=(rows, splits, specs["shares"].shape[2]),
        constants={
            "HEAD_DIM": head_dim,
            "MOST_SPLITS": attention.MAX_SPLITS,
            **_visibility(head_dim, attributes),
        },
        warps=min(4, attention.MAX_SPLITS * head_dim // 1024),
        stages=1,
    )


def _describe_attended(specs: Specs, attributes: Attributes) -> dict[str, TensorSpec]:
    return {"attended": specs["q"]}


def _describe_shares(specs: Specs, attributes: Attributes) -> dict[str, TensorSpec]:
    batch, query_heads, rows, head_dim = specs["q"].shape
    held = attention.share_rows(attributes["most_splits"], attributes["block_size"], rows)
    shape = (batch, query_heads, held)
    return {
        "shares": TensorSpec(DType.FLOAT32, (*shape, head_dim)),
        "log_sums": TensorSpec(DType.FLOAT32, shape),
    }


def _operation(*, is_split: bool, is_paged: bool, is_quantized: bool) -> Operation:
    inputs = ["q", "k_cache", "v_cache", "key_value_lengths"]
    inputs += ["page_table"] * is_paged + ["kv_scales"] * is_quantized + ["sinks"] * (not is_split)
    suffix = "_split" * is_split + form_suffix(is_paged=is_paged, is_quantized=is_quantized)
    attributes = ["block_size", "is_causal", "window", *["most_splits"] * is_split]
    return Operation(
        name=f"block_attention{suffix}",
        kernel="block_attention",
        inputs=tuple(inputs),
        extras=("rows", "capacity", *["splits", "share_rows"] * is_split),
        outputs=("shares", "log_sums") if is_split else ("attended",),
        attributes=dict.fromkeys(attributes, int),
        describe=_describe_shares if is_split else _describe_attended,
        launch=partial(_launch, is_split),
        tactics=len(TACTICS),
    )


MERGE = Operation(
    name="block_attention_merge",
    kernel="block_attention_merge",
    inputs=("q", "shares", "log_sums", "key_value_lengths", "sinks"),
    extras=("rows", "splits", "share_rows"),
    outputs=("attended",),
    attributes=dict.fromkeys(("block_size", "is_causal", "window", "most_splits"), int),
    describe=_describe_attended,
    launch=_launch_merge,
)

OPERATIONS = (
    *(
        _operation(is_split=is_split, is_paged=is_paged, is_quantized=is_quantized)
        for is_split in (False, True)
        for is_quantized in (False, True)
        for is_paged in (False, True)
    ),
    MERGE,
)


def attention_operations(
    capacity: int, block_size: int, window: int, *, is_paged: bool, is_quantized: bool
) -> list[Operation]:
    """The operations for caches of `capacity` positions: one, or the split and the merge."""
    is_split = attention.needs_split(capacity, block_size, window)
    suffix = "_split" * is_split + form_suffix(is_paged=is_paged, is_quantized=is_quantized)
    (first,) = (one for one in OPERATIONS if one.name == f"block_attention{suffix}")
    return [first, *[MERGE] * is_split]

"""The operations of `block_attention` and their launches.

`block_attention` is one launch, for short caches and windows. Long ones take two: `_split` writes
a partial result per split of the context, `_merge` combines them. The first two have every form
(`kv_caches.py`). Attributes: block_size, the most rows of a verify step; is_causal, 1 for the
lower-right mask; window, 0 for none; most_splits, the most splits of a row. Tactic 0 gives a
program the rows of one block, tactic 1 as many as registers hold: prefill chunks read K and V less.
Tactics 2 and 3 give it half a block's rows, at most 32, and 16: more programs, whose tiles take
less time, for few sequences. Tactic 4 is the floor: 48 KiB of shared memory, which a launcher need
not opt in to.
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
from dflash_trt.hardware import kernels as attention
from dflash_trt.hardware.kernels import Extent

TACTICS = BLOCK, MOST, FEW, LEAST, FLOOR = range(5)
"""A program has the rows of a block, the most rows, few, the least, or at most what 48 KiB hold."""

MAX_ROWS, MAX_ROW_ELEMENTS = 128, 64 * 256
"""Most query rows of a program, and most elements of them: its float32 sums stay in registers."""

LEAST_ROWS, FEW_ROWS = 16, 32
"""Rows of a product on tensor cores, and of a program that shares its block's with others."""

WHOLE_ROWS = 32
"""Most of a program that writes the result at once, with heads of 128 and more: 64 spill."""

FLOOR_ROW_ELEMENTS = 32 * 128
"""Most elements of the floor's rows: beside 8 KiB of q and 8 of products, 32 KiB of K and V fit."""

TILE_BYTES, FLIGHT_BYTES = 16 << 10, 64 << 10
"""Of K in a tile, and of K and V that a program has in flight: so much fits every architecture."""


def tile_positions(head_dim: int, cache: DType, tactic: int) -> int:
    """Cache positions per iteration of the kernel's loop: TILE_BYTES of K in 16 bits.

    At most 64 of 8 bits: their conversion takes registers, too.
    """
    positions = TILE_BYTES // 2 // head_dim
    is_narrow = tactic == FLOOR or cache.numpy.itemsize == 1
    return min(64, positions) if is_narrow else positions


def _program_rows(block_rows: int, head_dim: int, tactic: int, *, is_split: bool) -> int:
    """Query rows of a program; a block has `block_rows` of a KV head."""
    elements = FLOOR_ROW_ELEMENTS if tactic == FLOOR else MAX_ROW_ELEMENTS
    is_whole = not is_split and head_dim >= 128
    most = min(WHOLE_ROWS if is_whole else MAX_ROWS, elements // head_dim)
    if tactic == MOST:
        return most
    most = min(most, max(LEAST_ROWS, next_power_of_two(block_rows)))
    if tactic == FEW:
        return max(LEAST_ROWS, min(FEW_ROWS, most // 2))
    return LEAST_ROWS if tactic == LEAST else most


def _warps(program_rows: int, head_dim: int, specs: Specs) -> int:
    """Warps per program, enough that its sums, scores and addresses stay in registers.

    No more: of 64 rows, two groups of four would compute the same scores on sm_90a.
    """
    most = 16 if "page_table" in specs and "kv_scales" in specs else 128
    is_large = program_rows * head_dim >= most * 128
    return 8 if is_large or program_rows >= 128 or head_dim > 256 else 4


def _stages(head_dim: int, cache: DType, tile_bytes: int, tactic: int, *, is_paged: bool) -> int:
    """Software pipeline depth for tiles of K and V of `tile_bytes`.

    One more than tiles in flight, four at most. A page table is read before them, in two more steps
    unless there are four. Wide heads have one tile in flight, beside their rows; so has the
    floor, or two of 8 bits, whose pages take a step each.
    """
    if tactic == FLOOR:
        tiles = max(1, 2 // cache.numpy.itemsize)
        return 1 + (2 * tiles if is_paged else tiles)
    tiles = 1 if head_dim > 128 else max(1, min(4, FLIGHT_BYTES // tile_bytes))
    return 1 + tiles + (2 if is_paged and tiles < 4 else 0)


def _capacity(specs: Specs) -> Extent:
    """How many positions the cache of one sequence can hold."""
    if "page_table" in specs:
        return specs["page_table"].shape[1] * fixed(specs["k_cache"].shape[1], "the page size")
    return specs["k_cache"].shape[2]


def _visibility(attributes: Attributes) -> dict[str, Constant]:
    """The constants that fix the mask."""
    return {"CAUSAL": bool(attributes["is_causal"]), "WINDOW": attributes["window"]}


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
    if is_split:
        splits = attention.split_count(attributes["most_splits"], batch * query_heads * rows)
    pages = (specs["k_cache"].shape[0],) * is_paged
    extras = (rows, capacity, *pages, *(splits,) * is_split)
    cache = specs["k_cache"].dtype
    block_rows = group * attributes["block_size"]
    program_rows = _program_rows(block_rows, head_dim, tactic, is_split=is_split)
    tile = tile_positions(head_dim, cache, tactic)
    tile_bytes = 2 * tile * head_dim * cache.numpy.itemsize
    row_blocks = (rows * group + (program_rows - 1)) // program_rows
    absent = [name for name in ("page_table", "kv_scales") if name not in specs]
    absent += ["sinks", "attended"] if is_split else ["shares", "log_sums"]
    return Launch(
        grid=(row_blocks * splits, kv_heads, batch),
        extras=extras,
        constants={
            **dict.fromkeys(absent),
            **({} if is_paged else {"pages": 0}),
            **({} if is_split else {"splits": 1}),
            "GROUP": group,
            "HEAD_DIM": head_dim,
            **_visibility(attributes),
            "RUN": attention.RUN,
            "TILE": tile,
            "BLOCK_M": program_rows,
            "PAGE_SIZE": fixed(specs["k_cache"].shape[1], "the page size") if is_paged else 0,
        },
        warps=_warps(program_rows, head_dim, specs),
        stages=_stages(head_dim, cache, tile_bytes, tactic, is_paged=is_paged),
    )


def _launch_merge(specs: Specs, attributes: Attributes, tactic: int) -> Launch:
    batch, query_heads, rows, _ = specs["q"].shape
    head_dim = _head_dim(specs)
    return Launch(
        grid=(rows, query_heads, batch),
        extras=(rows, attention.split_count(attributes["most_splits"], batch * query_heads * rows)),
        constants={
            "HEAD_DIM": head_dim,
            "MOST_SPLITS": attention.MAX_SPLITS,
            "RUN": attention.RUN,
            **_visibility(attributes),
        },
        warps=min(4, attention.MAX_SPLITS * head_dim // 1024),
        stages=1,
    )


def _describe_attended(specs: Specs, attributes: Attributes) -> dict[str, TensorSpec]:
    return {"attended": specs["q"]}


def _describe_shares(specs: Specs, attributes: Attributes) -> dict[str, TensorSpec]:
    batch, query_heads, rows, head_dim = specs["q"].shape
    held = attention.share_rows(attributes["most_splits"], batch * query_heads * rows)
    return {
        "shares": TensorSpec(DType.FLOAT32, (held, head_dim)),
        "log_sums": TensorSpec(DType.FLOAT32, (held,)),
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
        extras=("rows", "capacity", *["pages"] * is_paged, *["splits"] * is_split),
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
    extras=("rows", "splits"),
    outputs=("attended",),
    attributes=dict.fromkeys(("is_causal", "window", "most_splits"), int),
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

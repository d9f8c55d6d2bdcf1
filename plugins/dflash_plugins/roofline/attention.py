"""Attention in decoding as work: the launch that reads the cache, and the merge of its splits."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from dflash_plugins.roofline.model import (
    LaunchWork,
    ProgramGroup,
    attention_tile_seconds,
    resident_programs,
)
from dflash_plugins.roofline.rates import GpuRates

FLOAT32_BYTES = 4
OPENING_LOADS = 2
"""Of every attention kernel: how long a sequence is, then q. A page table is one more."""
MERGE_LOADS = 1
"""How long a sequence is; then all of a row's shares at once."""
MERGE_THREADS, MERGE_REGISTERS = 128, 48


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionWork:
    """Attention of `rows` rows of each of `batch` sequences that hold `context` positions.

    A program takes one split of a KV head, with `tile_rows` rows for its query heads, in tiles of
    `tile_positions`; where they are more, `row_blocks` programs read the same K and V, all but the
    first from the L2 cache. `split_tiles` has the tiles of each split of a sequence; None deals the
    context out evenly. `is_merged`: even one split leaves its share for a merge. `is_converted`:
    K and V are converted to the products' type.
    """

    batch: int
    context: int
    query_heads: int
    kv_heads: int
    head_dim: int
    rows: int
    item_bytes: int
    is_paged: bool
    tile_rows: int
    tile_positions: int
    buffers: int
    resident: int
    splits: int
    split_tiles: tuple[int, ...] | None = None
    row_blocks: int = 1
    is_merged: bool = False
    is_converted: bool = False

    @property
    def cache_bytes(self) -> int:
        """K and V of the whole context, read once."""
        return 2 * self.batch * self.context * self.kv_heads * self.head_dim * self.item_bytes

    @property
    def tiles(self) -> tuple[int, ...]:
        """Tiles of each split of one sequence and KV head; none where a split has no work."""
        if self.split_tiles is not None:
            return self.split_tiles
        tiles = -(-self.context // self.tile_positions)
        least, more = divmod(tiles, self.splits)
        return tuple(least + (split < more) for split in range(self.splits))

    @property
    def groups(self) -> tuple[ProgramGroup, ...]:
        """Programs by their number of tiles, the longest first."""
        counts = Counter(tiles for tiles in self.tiles if tiles)
        each = self.batch * self.kv_heads * self.row_blocks
        return tuple((each * count, tiles) for tiles, count in sorted(counts.items(), reverse=True))

    @property
    def share_bytes(self) -> int:
        """Of the shares that splits leave for the merge; 0 where there is no merge."""
        if self.splits == 1 and not self.is_merged:
            return 0
        used = sum(1 for tiles in self.tiles if tiles)
        rows = self.batch * self.query_heads * self.rows
        return rows * used * (self.head_dim + 1) * FLOAT32_BYTES

    def shares_fit(self, rates: GpuRates) -> bool:
        """Whether the merge finds the shares in the L2 cache."""
        return self.share_bytes <= rates.l2_bytes


def split_work(work: AttentionWork, rates: GpuRates) -> LaunchWork:
    """The launch that reads K and V."""
    arithmetic = attention_tile_seconds(
        rates,
        rows=work.tile_rows,
        positions=work.tile_positions,
        head_dim=work.head_dim,
        is_converted=work.is_converted,
    )
    outputs = work.batch * work.query_heads * work.rows * work.head_dim * 2
    return LaunchWork(
        name="attention",
        groups=work.groups,
        tile_bytes=2 * work.tile_positions * work.head_dim * work.item_bytes / work.row_blocks,
        buffers=work.buffers,
        tile_seconds=arithmetic,
        resident=work.resident,
        cached_loads=OPENING_LOADS + work.is_paged,
        written_bytes=work.share_bytes or outputs,
        is_written_cached=work.shares_fit(rates),
    )


def merge_work(work: AttentionWork, rates: GpuRates) -> LaunchWork:
    """The launch that merges the splits: a program for each row of a query head."""
    programs = work.batch * work.query_heads * work.rows
    resident = resident_programs(
        rates, threads=MERGE_THREADS, registers=MERGE_REGISTERS, shared_bytes=0
    )
    return LaunchWork(
        name="merge",
        groups=((programs, 1),),
        tile_bytes=work.share_bytes / programs,
        buffers=1,
        tile_seconds=0.0,
        resident=resident,
        cached_loads=MERGE_LOADS,
        is_cached=work.shares_fit(rates),
        written_bytes=programs * work.head_dim * 2,
    )

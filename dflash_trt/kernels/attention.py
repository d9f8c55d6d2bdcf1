"""How attention is split over a cache: shares that several programs compute, and their merge.

Extents are integers, or TensorRT's symbolic expressions while an engine is built: this computes
with + - * // alone, the extent on the left.
"""

from __future__ import annotations

from typing import Any

Extent = Any
"""int, or a tensorrt.plugin.ShapeExpr."""

BLOCK_ATTENTION = "block_attention"
SPLIT_ATTENTION = f"{BLOCK_ATTENTION}_split"
"""What the names of all attention kernels begin with, and those of kernels that leave shares."""

HEAD_DIMS = (64, 128, 256, 512)
"""Head sizes that there are attention kernels for."""

RUN = 512
"""Cache positions of a share, before positions are dealt in tiles."""

MAX_SPLITS = 32
"""Programs per sequence and KV head: with 8 KV heads 256 at batch 1, more than processors."""

BLOCK_ROWS = 16
"""Rows that take every split, at most: what DFlash drafts are trained for."""

FLOAT32_BYTES = 4


def most_splits(capacity: int) -> int:
    """The most shares of a cache of `capacity` positions: what a block of rows has.

    Whole runs: a share of few positions costs as much to write as one of many.
    """
    return max(1, min(MAX_SPLITS, capacity // RUN))


def split_count(most: int, block_size: int, rows: Extent) -> Extent:
    """Shares in a call of `rows` rows per sequence: of a block `most`, of more that many divided
    by their blocks, rounded up.
    """
    block = min(BLOCK_ROWS, block_size)
    blocks = (rows + (block - 1)) // block
    return (blocks + (most - 1)) // blocks


def share_rows(most: int, block_size: int, rows: Extent) -> Extent:
    """Rows of all shares that are allocated: at least split_count · `rows`, as many for a block.

    Unlike that product it grows with `rows`: TensorRT plans memory for a profile's largest.
    """
    return rows + (most - 1) * min(BLOCK_ROWS, block_size)


def needs_split(capacity: int, block_size: int, window: int = 0) -> bool:
    """Whether a block may see more positions than one program per KV head should read."""
    return (min(capacity, window + block_size) if window else capacity) >= 2 * RUN


def scratch_bytes(
    *,
    capacity: int,
    block_size: int,
    window: int,
    query_heads: int,
    head_dim: int,
    batch: int,
    rows: int,
) -> int:
    """Bytes that one layer's attention leaves for its merge in a call of [batch, rows] rows.

    0 where one launch is enough, or no kernel has the head size. An engine needs its most of any.
    """
    if head_dim not in HEAD_DIMS or not needs_split(capacity, block_size, window):
        return 0
    held: int = share_rows(most_splits(capacity), block_size, rows)
    return batch * query_heads * held * (head_dim + 1) * FLOAT32_BYTES

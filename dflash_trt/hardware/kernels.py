"""What this project's GPU kernels can do, as data and arithmetic that graphs and builders ask.

The kernels themselves, and how they are launched, are in `dflash_plugins`, which imports this.

Attention is split over a cache into shares that several programs compute, and their merge. Extents
are integers, or TensorRT's symbolic expressions while an engine is built: what computes them uses
+ - * // alone, the extent on the left.
"""

from __future__ import annotations

from typing import Any

from dflash_trt.errors import DflashError
from dflash_trt.hardware.gpus import Arch, arches

PLUGIN_INTERFACE = 1
"""One more whenever a plugin has other operands, or the same ones mean something else.

An engine keeps the kernels that it was built with, and TensorRT calls every plugin's version "1".
So neither would notice that the host now packs `sampling`, lays out a cache or draws noise in
another way. A bundle's manifest has the number that its engines were built with.
"""


def kernel_arches() -> dict[str, Arch]:
    """The architectures with kernels, oldest first, by what is compiled for ("sm_90a")."""
    known = sorted(arches().values(), key=lambda arch: arch.number)
    return {arch.kernels: arch for arch in known if arch.kernels is not None}


def kernel_arch(arch: str) -> str:
    """The architecture that kernels for GPUs of `arch` ("sm_100") are compiled for ("sm_100a").

    Raises:
        DflashError: there are no kernels for it.
    """
    known = {one.name: kernels for kernels, one in kernel_arches().items()}
    if arch not in known:
        what = f"there are no kernels for {arch}"
        fix = f"they are for {', '.join(known)}; leave it out"
        raise DflashError(what, where="--plugins", fix=fix, usage=True)
    return known[arch]


MAX_ROWS = 32
"""Rows of one verify step that `accept` has room for; DFlash drafts are trained for 16 at most."""


def check_settled_rows(block_size: int) -> None:
    """Raises DflashError for a block that is more than `accept` has room for."""
    if block_size > MAX_ROWS:
        what = f"a step settles at most {MAX_ROWS} rows, not a block of {block_size}"
        fix = f"pass {MAX_ROWS} or less; engines without --plugins take more"
        raise DflashError(what, where="--block-size", fix=fix, usage=True)


RECURRENT_HEAD_DIMS = (16, 32, 64, 128)
"""Head sizes that there are kernels for; all public hybrids have 128."""

MOST_TAPS = 4
"""Rows that its convolution takes, at most."""

SIDES = 2
"""Buffers of a sequence's old rows: a call reads one and writes the other."""


def has_recurrent_kernel(head_dim: int, taps: int) -> bool:
    """Whether it takes heads of `head_dim` behind a convolution over `taps` rows."""
    return head_dim in RECURRENT_HEAD_DIMS and taps <= MOST_TAPS


Extent = Any
"""int, or a tensorrt.plugin.ShapeExpr."""

BLOCK_ATTENTION = "block_attention"
"""What the names of all attention kernels begin with."""

HEAD_DIMS = (64, 128, 256, 512)
"""Head sizes that there are attention kernels for."""

ONE_LAUNCH = 1024
"""From so many positions on, several programs and their merge are faster than one."""

RUN = 256
"""Cache positions that go to a split in its turn: a multiple of every tile."""

SPLIT_POSITIONS = 512
"""Of a full cache in a split, at least: a share of few costs as much to write as one of many."""

MAX_SPLITS = 32
"""Of a row, where a call has few rows: with 4 KV heads 128 programs, one for a processor."""

UNIT_ROWS = 512
"""Query rows of a call, over all sequences and heads, whose programs fill a GPU with MAX_SPLITS:
a block of 16 rows of 32 heads."""

FLOAT32_BYTES = 4


def most_splits(capacity: int) -> int:
    """The most splits of a cache of `capacity` positions: what a call of few rows has."""
    return max(1, min(MAX_SPLITS, capacity // SPLIT_POSITIONS))


def unit_rows(most: int) -> int:
    """Query rows of a call whose programs fill a GPU with `most` splits: of fewer, more rows."""
    return UNIT_ROWS * MAX_SPLITS // most


def split_count(most: int, rows: Extent) -> Extent:
    """Splits in a call of `rows` query rows over all sequences and heads.

    `most` of a unit of rows; of more, that many divided by their units, rounded up.
    """
    unit = unit_rows(most)
    units = (rows + (unit - 1)) // unit
    return (units + (most - 1)) // units


def share_rows(most: int, rows: Extent) -> Extent:
    """Rows of all shares that are allocated, for calls of `rows` over all sequences and heads.

    At least split_count · `rows`. Unlike that product it grows with `rows`: TensorRT plans memory
    for a profile's largest.
    """
    return rows + (most - 1) * unit_rows(most)


def needs_split(capacity: int, block_size: int, window: int = 0) -> bool:
    """Whether a block may see more positions than one program per KV head should read."""
    return (min(capacity, window + block_size) if window else capacity) >= ONE_LAUNCH


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
    held: int = share_rows(most_splits(capacity), batch * query_heads * rows)
    return held * (head_dim + 1) * FLOAT32_BYTES

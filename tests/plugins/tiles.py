"""Which tiles `block_attention` reads, by its own functions; runs in the interpreting process."""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from dflash_plugins.block_attention.kernel import tile_position, tile_range
from dflash_plugins.testing.numeric import Array


def count_reads(first: int, end: int, capacity: int, splits: int, run: int, tile: int) -> Array:
    """int [splits, capacity // tile]: how often each split reads each tile of positions."""
    reads = torch.zeros((splits, capacity // tile), dtype=torch.int32)
    _count_reads[(splits,)](first, end, reads, capacity // tile, splits, run, tile)
    return np.asarray(reads.numpy())


@triton.jit
def _count_reads(
    first, end, reads, tiles, splits: tl.constexpr, run: tl.constexpr, tile: tl.constexpr
):
    split = tl.program_id(0)
    begin, stop = tile_range(split, first, end, splits, run, tile)
    for index in tl.range(begin, stop):
        counter = reads + split * tiles + tile_position(split, index, splits, run, tile) // tile
        tl.store(counter, tl.load(counter) + 1)

"""What the kernel of Gated DeltaNet layers, `gated_delta_step`, can do."""

from __future__ import annotations

HEAD_DIMS = (16, 32, 64, 128)
"""Head sizes that there are kernels for; all public hybrids have 128."""

MOST_TAPS = 4
"""Rows that its convolution takes, at most."""

SIDES = 2
"""Buffers of a sequence's old rows: a call reads one and writes the other."""


def has_recurrent_kernel(head_dim: int, taps: int) -> bool:
    """Whether it takes heads of `head_dim` behind a convolution over `taps` rows."""
    return head_dim in HEAD_DIMS and taps <= MOST_TAPS

"""How large a step `accept` settles."""

from __future__ import annotations

from dflash_trt.errors import DflashError

MAX_ROWS = 32
"""Rows of one verify step that `accept` has room for; DFlash drafts are trained for 16 at most."""


def check_settled_rows(block_size: int) -> None:
    """Raises DflashError for a block that is more than `accept` has room for."""
    if block_size > MAX_ROWS:
        raise DflashError(
            f"a step settles at most {MAX_ROWS} rows, not a block of {block_size}",
            where="--plugins",
            fix=f"pass --block-size {MAX_ROWS} or less, or leave it out",
            usage=True,
        )

"""What a draft is trained on: rows of tokens, and the target's tapped features of each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dflash_trt.errors import DflashError

TOKENS, ROWS, FEATURES = "tokens.npy", "rows.npy", "features.npy"


@dataclass(frozen=True, slots=True)
class FeatureStore:
    """Rows of prompt and answer, one after the other.

    Args:
        tokens: [N] int32, of all rows.
        rows: [R, 3] int64: where a row begins, its prompt's tokens, all of its tokens.
        features: [N, (taps + 1) · hidden] uint16, the bits of bfloat16: the residual streams
            after the tapped layers, in the taps' order, and after the last layer. Read from disk
            as needed.
    """

    tokens: NDArray[np.int32]
    rows: NDArray[np.int64]
    features: NDArray[np.uint16]

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def answer_tokens(self) -> int:
        """Tokens that the target said, in all rows."""
        return int((self.rows[:, 2] - self.rows[:, 1]).sum())


def open_store(folder: Path) -> FeatureStore:
    """Opens a store; its features stay on disk.

    Raises:
        DflashError: files that are missing or do not fit each other.
    """
    try:
        tokens = np.load(folder / TOKENS, allow_pickle=False)
        rows = np.load(folder / ROWS, allow_pickle=False)
        features = np.load(folder / FEATURES, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise DflashError(f"is not a store of features: {error}", where=folder) from error
    store = FeatureStore(tokens, rows, features)
    kinds = (tokens.dtype, rows.dtype, features.dtype)
    if (
        kinds != (np.int32, np.int64, np.uint16)
        or (tokens.ndim, rows.ndim, features.ndim) != (1, 2, 2)
        or rows.shape[1] != 3
        or len(features) != len(tokens)
    ):
        raise DflashError("is not a store of features: its arrays do not fit", where=folder)
    ends = rows[:, 0] + rows[:, 2]
    if len(rows) and (
        rows.min() < 0 or ends.max() > len(tokens) or (rows[:, 1] > rows[:, 2]).any()
    ):
        raise DflashError("is not a store of features: a row ends outside it", where=folder)
    return store

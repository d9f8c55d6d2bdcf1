"""What a draft is trained on: rows of tokens, and the target's tapped features of each."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from dflash_trt.backends.base import FloatArray
from dflash_trt.core.strict_json import read_json_object
from dflash_trt.errors import DflashError
from dflash_trt.training.work_folder import write_json

TOKENS, ROWS, FEATURES = "tokens.npy", "rows.npy", "features.npy"
_DONE = "done.json"
# Rows are noted as done after this many tokens: what a kill costs.
_NOTE_TOKENS = 4096
_BLOCK_BYTES = 512  # what st_blocks counts in, whatever the file system's own blocks are

Features = Callable[[Sequence[int]], FloatArray]
"""Token ids of a row to float32 [tokens, (taps + 1) · hidden]; see `Replay.features`."""


@dataclass(frozen=True, slots=True)
class TokenRow:
    """A prompt and its answer."""

    prompt_ids: Sequence[int]
    answer_ids: Sequence[int]

    @property
    def token_ids(self) -> list[int]:
        return [*self.prompt_ids, *self.answer_ids]


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


class NoSpaceError(DflashError):
    """The disk has no room for the features."""


def to_bits(features: FloatArray) -> NDArray[np.uint16]:
    """The bits of the nearest bfloat16 values; ties to even."""
    bits: NDArray[np.uint16] = features.astype(ml_dtypes.bfloat16).view(np.uint16)
    return bits


def check_space(tokens: int, width: int, folder: Path) -> None:
    """Refuses features that the disk has no room for; those that are there already count.

    Raises:
        NoSpaceError: says how much is missing, and what takes less.
    """
    needed = tokens * width * np.dtype(np.uint16).itemsize
    there = folder / FEATURES
    free = shutil.disk_usage(folder).free
    if there.is_file():  # its blocks, as what was not written yet of it is a hole
        free += min(there.stat().st_blocks * _BLOCK_BYTES, needed)
    if needed > free:
        raise NoSpaceError(
            f"features of {tokens:,} tokens take {needed:,} bytes, {free:,} are free",
            where=folder,
            fix="free some space, --set work=DIR on another disk, fewer rows, or online=true",
        )


def lay_out(rows: Sequence[TokenRow]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """The tokens and the table of rows of a store."""
    table, offset = [], 0
    for row in rows:
        size = len(row.prompt_ids) + len(row.answer_ids)
        table.append((offset, len(row.prompt_ids), size))
        offset += size
    tokens = np.fromiter((one for row in rows for one in row.token_ids), np.int32, offset)
    return tokens, np.array(table, np.int64).reshape(-1, 3)


def capture(
    rows: Sequence[TokenRow],
    width: int,
    compute: Features,
    folder: Path,
    on_tokens: Callable[[int], None] = lambda count: None,
) -> FeatureStore:
    """Writes the store of `rows` into `folder`, or goes on with one that was begun there.

    One row is in memory at a time.

    Raises:
        DflashError: features that are not finite, or a disk that is too small.
    """
    tokens, table = lay_out(rows)
    check_space(len(tokens), width, folder)
    np.save(folder / TOKENS, tokens)
    np.save(folder / ROWS, table)
    path, done = folder / FEATURES, folder / _DONE
    begun = path.is_file() and done.is_file()
    first = int(read_json_object(done)["rows"]) if begun else 0
    features = np.lib.format.open_memmap(  # type: ignore[no-untyped-call]
        path, mode="r+" if begun else "w+", dtype=np.uint16, shape=(len(tokens), width)
    )
    write_json(done, {"rows": first})
    on_tokens(int(table[:first, 2].sum()))
    unnoted = 0
    for index in range(first, len(rows)):
        offset, _, size = map(int, table[index])
        computed = compute(rows[index].token_ids)
        if not np.isfinite(computed).all():
            what = f"the target's features of row {index} are not finite"
            raise DflashError(what, where="capture", fix="try another precision of the target")
        features[offset : offset + size] = to_bits(computed)
        on_tokens(size)
        unnoted += size
        if unnoted >= _NOTE_TOKENS or index == len(rows) - 1:
            features.flush()
            write_json(done, {"rows": index + 1})
            unnoted = 0
    return open_store(folder)


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
    if len(features) != len(tokens) or rows[:, 2].sum() != len(tokens):
        raise DflashError("is not a store of features: its arrays do not fit", where=folder)
    return FeatureStore(tokens, rows, features)


class OnlineFeatures:
    """A store's features that are computed when they are asked for, a row at a time.

    Answers `features[offset : offset + tokens]` of whole rows as an array on disk would.
    """

    def __init__(
        self, rows: Sequence[TokenRow], table: NDArray[np.int64], compute: Features
    ) -> None:
        self._rows = dict(zip(table[:, 0].tolist(), rows, strict=True))
        self._compute = compute

    def __getitem__(self, part: slice) -> NDArray[np.uint16]:
        return to_bits(self._compute(self._rows[part.start].token_ids))


def online_store(rows: Sequence[TokenRow], compute: Features) -> FeatureStore:
    """A store of `rows` whose features are on no disk."""
    tokens, table = lay_out(rows)
    features: Any = OnlineFeatures(rows, table, compute)
    return FeatureStore(tokens, table, features)

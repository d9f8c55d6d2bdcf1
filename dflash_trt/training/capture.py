"""Capture: the target's residual streams of every row, computed by the served graphs."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from dflash_trt.backends.base import FloatArray
from dflash_trt.core.strict_json import read_json_object
from dflash_trt.errors import DflashError
from dflash_trt.training.feature_store import FEATURES, ROWS, TOKENS
from dflash_trt.training.work_folder import write_json

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


class NoSpaceError(DflashError):
    """The disk has no room for the features."""


def to_bits(features: FloatArray) -> NDArray[np.uint16]:
    """The bits of the nearest bfloat16 values; ties to even."""
    bits: NDArray[np.uint16] = features.astype(ml_dtypes.bfloat16).view(np.uint16)
    return bits


def feature_bytes(tokens: int, width: int) -> int:
    """What the features of so many tokens take."""
    return tokens * width * np.dtype(np.uint16).itemsize


def check_space(tokens: int, width: int, folder: Path) -> None:
    """Refuses features that the disk has no room for; those that are there already count.

    Raises:
        NoSpaceError: says how much is missing, and what takes less.
    """
    needed = feature_bytes(tokens, width)
    there = folder / FEATURES
    free = shutil.disk_usage(folder).free
    if there.is_file():  # its blocks, as what was not written yet of it is a hole
        free += min(there.stat().st_blocks * _BLOCK_BYTES, needed)
    if needed > free:
        raise NoSpaceError(
            f"features of {tokens:,} tokens take {needed:,} bytes, {free:,} are free",
            where=folder,
            fix="free some space, pass --work on another disk, fewer --rows, or --online",
        )


def layout(rows: Sequence[TokenRow]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
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
) -> None:
    """Writes the store of `rows` into `folder`, or goes on with one that was begun there.

    One row is in memory at a time.

    Raises:
        DflashError: features that are not finite, or a disk that is too small.
    """
    tokens, table = layout(rows)
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


class OnlineFeatures:
    """A store's features that are computed when they are asked for, a row at a time.

    Answers `features[offset : offset + tokens]` of whole rows as an array on disk would.
    """

    def __init__(self, rows: Sequence[TokenRow], width: int, compute: Features) -> None:
        _, table = layout(rows)
        self._rows = {int(offset): row for (offset, _, _), row in zip(table, rows, strict=True)}
        self._compute = compute
        self.shape = (int(table[:, 2].sum()), width)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, part: slice) -> NDArray[np.uint16]:
        return to_bits(self._compute(self._rows[part.start].token_ids))

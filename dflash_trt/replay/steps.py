"""StepTable: every verify step that was replayed, as columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from dflash_trt.backends.base import FloatArray, Int64Array

UNKNOWN = -1
"""A token that is not known, or not drafted, or its rank."""


@dataclass(frozen=True, slots=True, eq=False)
class StepTable:
    """N steps over blocks of S rows.

    Args:
        answer: [N] which of the answers.
        position: [N] of the anchor in prompt and output.
        trials, accepted: [N] drafts reached, and those of them that were accepted.
        emitted: [N] tokens that the step added.
        known: [N] tokens of the answer behind the anchor.
        draft_ids: [N,S-1]; UNKNOWN behind a block that the end of the context cut.
        token_ids: [N,S] the answer's tokens behind the anchor; UNKNOWN behind its end.
        rank: [N,S-1] how many tokens had a higher logit in the draft's slot than the answer's;
            UNKNOWN where that or the draft is.
        probability: [N,S-1] float32, the draft's own for its token; 0 where there is none.
    """

    answer: Int64Array
    position: Int64Array
    trials: Int64Array
    accepted: Int64Array
    emitted: Int64Array
    known: Int64Array
    draft_ids: Int64Array
    token_ids: Int64Array
    rank: Int64Array
    probability: FloatArray

    @classmethod
    def join(cls, rows: Sequence[StepRow], block_size: int) -> StepTable:
        """A table of steps, by answer and position."""
        ordered = sorted(rows, key=lambda row: (row.answer, row.position))

        def column(name: str) -> Int64Array:
            return np.array([getattr(row, name) for row in ordered], np.int64)

        def block(name: str, width: int) -> Int64Array:
            values = [getattr(row, name) for row in ordered]
            return np.array(values, np.int64).reshape(len(ordered), width)

        probability = [row.probability for row in ordered]
        return cls(
            **{name: column(name) for name in _COLUMNS},
            draft_ids=block("draft_ids", block_size - 1),
            token_ids=block("token_ids", block_size),
            rank=block("rank", block_size - 1),
            probability=np.array(probability, np.float32).reshape(len(ordered), block_size - 1),
        )

    def __len__(self) -> int:
        return len(self.answer)

    @property
    def block_size(self) -> int:
        """S."""
        return self.token_ids.shape[1]

    @property
    def reached(self) -> npt.NDArray[np.bool_]:
        """[N,S-1]: whether the draft in each slot was looked at, all before it accepted."""
        reached: npt.NDArray[np.bool_] = np.arange(self.block_size - 1) < self.trials[:, None]
        return reached

    def pick(self, chosen: npt.NDArray[np.bool_]) -> StepTable:
        """The steps that are chosen [N]."""
        return StepTable(**{one.name: getattr(self, one.name)[chosen] for one in fields(self)})


_COLUMNS = ("answer", "position", "trials", "accepted", "emitted", "known")


@dataclass(frozen=True, slots=True)
class StepRow:
    """One step; see StepTable."""

    answer: int
    position: int
    trials: int
    accepted: int
    emitted: int
    known: int
    draft_ids: Sequence[int]
    token_ids: Sequence[int]
    rank: Sequence[int]
    probability: Sequence[float]

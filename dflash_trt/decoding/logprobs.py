"""Log-probabilities of an output's tokens, from the logits that they were chosen from.

They are of the model itself: at temperature 1, before top-k and top-p, in float64. Processed ones
are of the row as it was chosen from: after penalties, masks, temperature, min-p, top-k and top-p.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from dflash_trt.backends.base import FloatArray

MAX_TOP_LOGPROBS = 20

LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]
LOGPROBS_MODES: tuple[LogprobsMode, ...] = get_args(LogprobsMode)
"""vLLM's names."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """How likely the target found a token of the output: the natural logarithm.

    `top_ids` are the likeliest tokens at its place, as many as were asked for and the
    likeliest first, the lower id among equals; `top_logprobs` are theirs. `rank` is the token's own
    place in that order, from 1; None where who sent it did not say.
    """

    token_id: int
    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()
    rank: int | None = None


def score_token(logits: FloatArray, token_id: int, top: int) -> TokenLogprob:
    """The token's log-probability by its row of logits [V], and those of the `top` likeliest."""
    row = logits.astype(np.float64)
    highest = row.max()
    row -= highest + np.log(np.exp(row - highest).sum())
    count = min(top, len(row))
    ids: list[int] = []
    if count:
        likely = np.flatnonzero(logits >= np.partition(logits, -count)[-count])
        ids = likely[np.argsort(-logits[likely], kind="stable")[:count]].tolist()
    own = logits[token_id]
    before = np.count_nonzero(logits > own) + np.count_nonzero(logits[:token_id] == own)
    values = tuple(row[ids].tolist())
    return TokenLogprob(token_id, float(row[token_id]), tuple(ids), values, 1 + int(before))

"""The winner of a whole row: the token whose logit and noise are the most together.

No token gets ahead of its logit and the bound of its group's noise, so that only a few hundred
tokens need noise of their own. Bounds are computed as scores are, in the same order and in
float64; what roundings of the last places do to them is far below `_SLACK`.
"""

from __future__ import annotations

import numpy as np

from dflash_trt.core.arrays import Float64Array, FloatArray
from dflash_trt.core.masks import TokenMask
from dflash_trt.sampling.noise import SMALLEST_NOISE, GroupNoise
from dflash_trt.sampling.params import SamplingParams
from dflash_trt.sampling.row import LogitRow

_FIRST_GROUPS = 24
"""Groups, by the bounds of their scores, that are looked into first."""
_HIGHEST = 16
_SLACK = 1e-6


def scale(logits: FloatArray, highest: float, temperature: float) -> Float64Array:
    """`logits`, in float64, divided by the temperature; the highest of them becomes 0."""
    # The maximum is 0, so a tiny temperature sends only the others towards -inf.
    with np.errstate(over="ignore"):
        scaled: Float64Array = (logits.astype(np.float64) - highest) / temperature
    return scaled


def draw_of_all(
    row: LogitRow, position: int, params: SamplingParams, mask: TokenMask | None = None
) -> int | None:
    """The winner of a whole row, or of what `mask` leaves of it; on a tie the lowest id.

    None where it leaves none of the highest.
    """
    highest = row.highest
    if mask is not None:
        top = row.top(_HIGHEST)
        top = top[mask.have(top)]
        if not top.size:
            return None
        # As of a row in which all else is minus infinity.
        highest = float(row.logits[top].max())
    noise = GroupNoise.draw(params.seed, position, 0, len(row.logits) - 1)
    bounds = -np.log(noise.least())[: len(row.peaks)]
    reach = scale(row.peaks, highest, params.temperature)
    reach += bounds
    first = max(len(reach) - _FIRST_GROUPS, 0)
    least = float(np.partition(reach, first)[first])
    while True:
        groups = np.flatnonzero(reach >= least - _SLACK)
        ids, logits = row.open(groups)
        scaled = scale(logits, highest, params.temperature)
        near = scaled + bounds[groups, None] >= least - _SLACK
        ids, scaled = ids[near], scaled[near]
        if mask is not None:
            allowed = mask.have(ids)
            ids, scaled = ids[allowed], scaled[allowed]
        if not ids.size:
            least = SMALLEST_NOISE  # which the highest token reaches
            continue
        scaled += noise.of(ids)
        winner = int(np.argmax(scaled))
        if scaled[winner] >= least:
            return int(ids[winner])
        least = float(scaled[winner])

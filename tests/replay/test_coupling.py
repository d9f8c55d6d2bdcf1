"""How sharp coupled drafts should be, on cases that are known beforehand."""

from __future__ import annotations

import numpy as np

from dflash_trt.replay.anchors import mean_tau
from dflash_trt.replay.coupling import SHARPNESS, Hits, fit

LAST = len(SHARPNESS) - 1


def test_sharpness_is_fitted_where_the_slots_before_were_right() -> None:
    right = np.zeros((6, 2, len(SHARPNESS)), np.bool_)
    right[:, 0, 1] = True  # always in slot 1
    right[:3, 0, LAST] = True
    right[:4, 1, 2] = True
    right[3:, 1, LAST] = True
    hits = Hits(right)
    assert fit([hits]) == [1, 2]
    assert hits.walk([1, 2]) == (6, 2)  # anchors 0 and 3
    assert hits.walk([LAST, LAST]) == (6, 4)
    assert mean_tau([hits.walk([1, 2])]) == 3.0

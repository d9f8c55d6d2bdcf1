"""Candidates picked as the engines' graphs do."""

from __future__ import annotations

import numpy as np

from dflash_trt.backends.base import FloatArray, Int64Array


def pick_candidates(logits: FloatArray, count: int, seed: int) -> Int64Array:
    """Ids [..., count] of the highest of `logits` [..., V]; equal ones in a random order."""
    shuffle = np.random.default_rng(seed).permutation(logits.shape[-1])
    order = np.argsort(-logits[..., shuffle], axis=-1, kind="stable")[..., :count]
    return shuffle[order].astype(np.int64)

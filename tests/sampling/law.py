"""The law that sampled tokens follow, by its definition."""

from __future__ import annotations

import math

import numpy as np

from dflash_trt.backends.base import FloatArray, Int64Array
from dflash_trt.decoding import SamplingParams


def exact_law(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """The distribution by its definition, in plain loops."""
    ranked = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    top = float(logits[ranked[0]])
    if params.min_p:
        least = math.log(params.min_p)
        behind = [(float(logits[token]) - top) / params.temperature for token in ranked]
        ranked = [token for token, scaled in zip(ranked, behind, strict=True) if scaled >= least]
    ranked = ranked[: params.top_k]
    weights = [math.exp((float(logits[token]) - top) / params.temperature) for token in ranked]
    kept, reached = [], 0.0
    for token, weight in zip(ranked, weights, strict=True):
        if reached >= params.top_p * sum(weights) and params.top_p < 1:
            break
        kept.append((token, weight))
        reached += weight
    law = np.zeros(len(logits))
    for token, weight in kept:
        law[token] = weight / reached
    return law


def pick_candidates(logits: FloatArray, count: int, seed: int) -> Int64Array:
    """Ids [..., count] of the highest of `logits` [..., V]; equal ones in a random order."""
    shuffle = np.random.default_rng(seed).permutation(logits.shape[-1])
    order = np.argsort(-logits[..., shuffle], axis=-1, kind="stable")[..., :count]
    return shuffle[order].astype(np.int64)

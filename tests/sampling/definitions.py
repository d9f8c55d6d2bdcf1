"""Noise, the law of sampled tokens and an engine's candidates, by their definitions."""

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


WORD = (1 << 64) - 1
GROUP = 256


def philox4x64(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    """Ten rounds, as the paper has them."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        product_0, product_1 = 0xD2E7470EE14C6C93 * c0, 0xCA5A826395121157 * c2
        c0, c1 = product_1 >> 64 ^ c1 ^ k0, product_1 & WORD
        c2, c3 = product_0 >> 64 ^ c3 ^ k1, product_0 & WORD
        k0, k1 = k0 + 0x9E3779B97F4A7C15 & WORD, k1 + 0xBB67AE8584CAA73B & WORD
    return c0, c1, c2, c3


def split_mix(start: int, number: int) -> int:
    """Output `number`, from 0, of the generator that starts from `start`."""
    z = start + (number + 1) * 0x9E3779B97F4A7C15 & WORD
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & WORD
    z = (z ^ z >> 27) * 0x94D049BB133111EB & WORD
    return z ^ z >> 31


def group_words(seed: int, position: int, group: int) -> tuple[int, int]:
    """x and k of a group of tokens."""
    words = philox4x64((1 + group // 2, position, 0, 0), (seed, 0))
    return words[2 * (group % 2)], words[2 * (group % 2) + 1]


def uniform(word: int) -> float:
    return ((word >> 32) + 0.5) / 2**32


def plain_noise(seed: int, position: int, token_id: int) -> float:
    x, k = group_words(seed, position, token_id // GROUP)
    exponential = -math.log(uniform(x)) / GROUP
    if x % GROUP != token_id % GROUP:
        exponential -= math.log(uniform(split_mix(k, token_id % GROUP)))
    return -math.log(exponential)

"""The noise of sampling/noise.py once more, from its definition: a token at a time, in integers."""

from __future__ import annotations

import math

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

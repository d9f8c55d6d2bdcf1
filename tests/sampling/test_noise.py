"""Noise against published vectors and its definition, and as independent as it should be."""

from __future__ import annotations

import numpy as np
import pytest

from dflash_trt.sampling.noise import (
    GROUP,
    LARGEST_NOISE,
    SMALLEST_NOISE,
    GroupNoise,
    draw_gumbel,
)
from tests.sampling import definitions

GOLDEN_NOISE = [2.611013659479229, -0.15687130633564386, 6.016810251423049, 0.19152478710397625]
MEMBER = 5


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ("0000000000000000 0000000000000000 0000000000000000 0000000000000000",
         "0000000000000000 0000000000000000",
         "16554d9eca36314c db20fe9d672d0fdc d7e772cee186176b 7e68b68aec7ba23b"),
        ("ffffffffffffffff ffffffffffffffff ffffffffffffffff ffffffffffffffff",
         "ffffffffffffffff ffffffffffffffff",
         "87b092c3013fe90b 438c3c67be8d0224 9cc7d7c69cd777b6 a09caebf594f0ba0"),
        ("243f6a8885a308d3 13198a2e03707344 a4093822299f31d0 082efa98ec4e6c89",
         "452821e638d01377 be5466cf34e90c6c",
         "a528f45403e61d95 38c72dbd566e9788 a5a1610e72fd18b5 57bd43b5e52b7fe6"),
    ],
)  # fmt: skip
def test_philox_known_answers(counter: str, key: str, expected: str) -> None:
    """The philox4x64-10 vectors of Random123's kat_vectors file."""
    words, keys = ([int(word, 16) for word in text.split()] for text in (counter, key))
    result = definitions.philox4x64(tuple(words), tuple(keys))
    assert " ".join(f"{word:016x}" for word in result) == expected


def test_noise_is_what_its_definition_says() -> None:
    """Members of groups and others, at the ends of what a seed and a position can be."""
    generator = np.random.default_rng(0)
    for seed, position in ((0, 0), (2**64 - 1, 2**63 - 1), (0x0123_4567_89AB_CDEF, 2**32 + 7)):
        ids = [0, 1, 255, 256, 511, 512, 151_935, *generator.integers(0, 262_144, 50).tolist()]
        for group in (0, 1, 593):
            ids.append(GROUP * group + definitions.group_words(seed, position, group)[0] % GROUP)
        noise = draw_gumbel(seed, position, np.array(ids))
        expected = [definitions.plain_noise(seed, position, token_id) for token_id in ids]
        np.testing.assert_allclose(noise, expected, rtol=1e-14, atol=1e-15)
        about = [GroupNoise.draw(seed, position, one, one).about(one) for one in ids]
        np.testing.assert_allclose(about, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.numeric
def test_noise_is_frozen() -> None:
    """Golden values: a change here changes every sampled text."""
    noise = draw_gumbel(42, 1000, np.array([0, 1, MEMBER, 151_935]))
    assert noise.dtype == np.float64
    np.testing.assert_allclose(noise, GOLDEN_NOISE, rtol=1e-14)


def test_noise_is_bounded() -> None:
    """By words of all bits and of none, and within a group by its least exponential."""
    assert draw_of_words(2**64 - 1, 0)[GROUP - 1] == LARGEST_NOISE
    step = 0x9E3779B97F4A7C15
    assert draw_of_words(0, 2**64 - step - step)[1] == SMALLEST_NOISE
    group = GroupNoise.draw(3, 9, 0, 100 * GROUP - 1)
    noise = group.of(np.arange(100 * GROUP)).reshape(100, GROUP)
    assert np.array_equal(noise.max(axis=1), -np.log(group.least()))


def draw_of_words(x: int, k: int) -> np.ndarray:
    """Noise of a group by its words."""
    return GroupNoise(np.array([[x, k]], np.uint64), 0).of(np.arange(GROUP))

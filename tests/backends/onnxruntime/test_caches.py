"""LinearCaches: lengths, growth and shrinking, and that each slot keeps what it holds."""

from __future__ import annotations

import numpy as np
import pytest

from dflash_trt.backends.onnxruntime.caches import FIRST_LENGTH, LENGTH_STEP, LinearCaches
from dflash_trt.graph.tensors import CacheShape
from tests.inspection import cache_arrays

SHAPES = {"target_k_0": CacheShape(2, 4), "target_v_0": CacheShape(2, 4), "x": CacheShape(1, 3)}


@pytest.fixture
def caches() -> LinearCaches:
    return LinearCaches(SHAPES, 3, 1000)


def fill(caches: LinearCaches) -> dict[str, np.ndarray]:
    """Distinct numbers everywhere; returns a copy."""
    for index, array in enumerate(cache_arrays(caches).values()):
        array[...] = np.arange(array.size, dtype=np.float32).reshape(array.shape) + index / 4
    return {name: array.copy() for name, array in cache_arrays(caches).items()}


def test_lengths_follow_what_is_held(caches: LinearCaches) -> None:
    """Doubled up to the limit; halved where a quarter would do, so that none swings."""
    lengths = {128: 128, 129: 256, 256: 256, 65: 256, 257: 512, 600: 1024, 1000: 1024}
    lengths |= {258: 1024, 255: 512, 3: 128}
    for held, length in lengths.items():
        moves, before = caches.generation, caches.length
        caches.fit([min(1, held), held, held // 2])
        assert (caches.length, caches.generation - moves) == (length, length != before), held
    with pytest.raises(ValueError, match="1025 positions do not fit caches of 1024"):
        caches.fit([1025, 0, 0])
    assert caches.length == FIRST_LENGTH


@pytest.mark.parametrize("max_seq_len", [1, 100, 129, 1000, 5000])
def test_every_length_is_a_multiple_of_the_step(max_seq_len: int) -> None:
    caches = LinearCaches(SHAPES, 3, max_seq_len)
    for held in np.random.default_rng(0).integers(0, max_seq_len + 1, 30).tolist():
        caches.fit([0, held, 0])
        assert held <= caches.length < max(FIRST_LENGTH + 1, max_seq_len + LENGTH_STEP)
        assert caches.length % LENGTH_STEP == 0
        assert caches.length <= max(4 * held, 2 * FIRST_LENGTH), "much more than is held"


def test_slots_that_hold_something_keep_it(caches: LinearCaches) -> None:
    before = fill(caches)
    caches.fit([0, 200, 3])
    for name, array in cache_arrays(caches).items():
        np.testing.assert_array_equal(array[1:, :, :128], before[name][1:])
        assert not array[0].any() and not array[:, :, 128:].any()
        assert [caches.address(name, slot) for slot in range(3)] == [
            array[slot:].ctypes.data for slot in range(3)
        ]
        assert caches.shape(name, 2) == list(array[:2].shape)
    caches.move(2, 0, 17)
    caches.clear(1)
    for name, array in cache_arrays(caches).items():
        np.testing.assert_array_equal(array[0, :, :17], before[name][2, :, :17])
        assert not array[0, :, 17:].any() and not array[1].any()
        np.testing.assert_array_equal(array[2, :, :128], before[name][2])

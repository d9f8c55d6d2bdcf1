"""LinearCaches: lengths, growth and shrinking, addresses, moves."""

from __future__ import annotations

import numpy as np
import pytest

from dflash_trt.backends.onnxruntime.caches import FIRST_LENGTH, LENGTH_STEP, LinearCaches
from dflash_trt.graph.tensors import CacheShape
from tests.inspection import cache_arrays

SHAPES = {"target_k_0": CacheShape(2, 4), "target_v_0": CacheShape(2, 4), "x": CacheShape(1, 3)}


def make(max_seq_len: int = 1000, slots: int = 3) -> LinearCaches:
    return LinearCaches(SHAPES, slots, max_seq_len)


def fit(caches: LinearCaches, longest: int) -> None:
    """All slots hold something, the second one the most."""
    caches.fit([min(1, longest), longest, longest // 2])


def fill(caches: LinearCaches) -> dict[str, np.ndarray]:
    """Distinct numbers everywhere; returns a copy."""
    for index, array in enumerate(cache_arrays(caches).values()):
        array[...] = np.arange(array.size, dtype=np.float32).reshape(array.shape) + index / 4
    return {name: array.copy() for name, array in cache_arrays(caches).items()}


@pytest.mark.parametrize("max_seq_len", [1, 64, 65, 1000, 4096])
def test_they_start_small_zeroed_and_contiguous(max_seq_len: int) -> None:
    """Shorter caches would send large heads down another path of the matrix product."""
    caches = make(max_seq_len)
    assert caches.length == FIRST_LENGTH
    assert list(cache_arrays(caches)) == list(SHAPES)
    for name, shape in SHAPES.items():
        array = cache_arrays(caches)[name]
        assert array.shape == (3, shape.kv_heads, FIRST_LENGTH, shape.head_dim)
        assert array.dtype == np.float32
        assert array.flags.c_contiguous
        assert not array.any()


def test_more_than_the_limit_is_refused_and_changes_nothing() -> None:
    caches = make(1000)
    with pytest.raises(ValueError, match="1025 positions do not fit caches of 1024"):
        caches.fit([1025, 0, 0])
    assert (caches.length, caches.generation) == (FIRST_LENGTH, 0)


def test_clearing_a_slot_leaves_the_others() -> None:
    caches = make()
    before = fill(caches)
    caches.clear(1)
    for name, array in cache_arrays(caches).items():
        assert not array[1].any()
        np.testing.assert_array_equal(array[[0, 2]], before[name][[0, 2]])


def test_growth_doubles_up_to_the_limit_and_each_move_is_counted() -> None:
    for held, length, moves in [
        *((0, 128, 0), (128, 128, 0), (129, 256, 1), (256, 256, 1), (257, 512, 1)),
        *((513, 1024, 1), (1000, 1024, 1)),
    ]:
        caches = make(1000)
        address = caches.address("x", 1)
        fit(caches, held)
        assert (caches.length, caches.generation) == (length, moves)
        assert all(array.shape[2] == length for array in cache_arrays(caches).values())
        assert moves or caches.address("x", 1) == address


@pytest.mark.parametrize("max_seq_len", [100, 129, 200, 1000, 1024, 5000])
def test_every_length_holds_what_is_held_and_is_a_multiple_of_the_step(max_seq_len: int) -> None:
    caches = make(max_seq_len)
    generator = np.random.default_rng(0)
    for held in generator.integers(0, max_seq_len + 1, 60).tolist():
        fit(caches, held)
        assert held <= caches.length < max(FIRST_LENGTH + 1, max_seq_len + LENGTH_STEP)
        assert caches.length % LENGTH_STEP == 0
        assert caches.length <= max(4 * held, 2 * FIRST_LENGTH), "much more than is held"


def test_a_move_drops_the_slots_that_hold_nothing() -> None:
    caches = make()
    before = fill(caches)
    caches.fit([0, 200, 3])
    for name, array in cache_arrays(caches).items():
        np.testing.assert_array_equal(array[1:, :, :128], before[name][1:])
        assert not array[0].any() and not array[:, :, 128:].any()


def test_shrinking_waits_for_a_quarter_and_keeps_the_front() -> None:
    caches = make()
    fit(caches, 600)
    before = fill(caches)
    fit(caches, 257)
    assert caches.length == 1024, "more than a quarter is held"
    fit(caches, 256)
    assert caches.length == 512
    fit(caches, 3)
    assert caches.length == FIRST_LENGTH
    for name, array in cache_arrays(caches).items():
        np.testing.assert_array_equal(array, before[name][:, :, :FIRST_LENGTH])


def test_a_length_near_a_boundary_does_not_swing() -> None:
    caches = make()
    fit(caches, 129)
    generation = caches.generation
    for held in (128, 129, 127, 256, 65, 129):
        fit(caches, held)
    assert caches.generation == generation


def test_address_points_at_the_first_byte_of_the_slot() -> None:
    caches = make()
    fill(caches)
    for name, array in cache_arrays(caches).items():
        for slot in range(3):
            assert caches.address(name, slot) == array[slot:].ctypes.data
        assert caches.shape(name, 2) == list(array[:2].shape)


def test_move_copies_the_front_of_one_slot_and_nothing_else() -> None:
    caches = make()
    before = fill(caches)
    caches.move(2, 0, 17)
    for name, array in cache_arrays(caches).items():
        np.testing.assert_array_equal(array[0, :, :17], before[name][2, :, :17])
        np.testing.assert_array_equal(array[0, :, 17:], before[name][0, :, 17:])
        np.testing.assert_array_equal(array[1:], before[name][1:])

"""MXFP4 to NVFP4: every value kept where the format can, and counted where it cannot."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_trt.quantization.codecs import (
    decode_e4m3,
    decode_e8m0,
    dequantize_mxfp4,
    dequantize_nvfp4,
)
from dflash_trt.quantization.experts import (
    global_exponent,
    global_scale,
    mxfp4_to_bf16,
    mxfp4_to_nvfp4,
)

BIAS = 127


def _blocks(exponents: list[int], seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """One row: a block of 32 random codes for each exponent."""
    generator = np.random.default_rng(seed)
    packed = generator.integers(0, 256, (1, 16 * len(exponents)), np.uint8)
    return packed, (np.array([exponents]) + BIAS).astype(np.uint8)


def _check(packed: np.ndarray, scales: np.ndarray) -> tuple[int, int]:
    """Recodes, and holds every block of 16 to the definition; exact and requantised blocks."""
    before = dequantize_mxfp4(packed, scales)
    shift = global_exponent(int(scales.max()))
    recoded = mxfp4_to_nvfp4(packed, scales, shift)
    after = dequantize_nvfp4(recoded.packed, recoded.scales, global_scale(shift))
    same = (after == before).reshape(-1, 16).all(axis=-1)
    assert recoded.exact == same.sum() and recoded.requantized == (~same).sum()
    fits = np.repeat(scales.astype(int) - BIAS - shift >= -9, 2, axis=-1).reshape(-1)
    assert same[fits].all()
    kept = np.repeat(fits, 8)
    np.testing.assert_array_equal(recoded.packed.reshape(-1)[kept], packed.reshape(-1)[kept])
    steps = decode_e4m3(recoded.scales).reshape(-1) * global_scale(shift)
    np.testing.assert_array_equal(
        steps[fits], np.repeat(decode_e8m0(scales), 2, axis=-1).reshape(-1)[fits]
    )
    return recoded.exact, recoded.requantized


@pytest.mark.parametrize("top", [-127, -110, -30, 0, 8, 100, 125])
def test_eighteen_exponents_in_a_row_are_exact(top: int) -> None:
    exponents = [top, *(max(top - i, -127) for i in range(18))]
    assert _check(*_blocks(exponents)) == (2 * len(exponents), 0)


@given(
    st.lists(st.integers(-127, 125), min_size=1, max_size=12),
    st.integers(0, 2**32 - 1),
)
def test_any_exponents(exponents: list[int], seed: int) -> None:
    exact, requantized = _check(*_blocks(exponents, seed))
    assert exact + requantized == 2 * len(exponents)


def test_bf16_holds_every_value() -> None:
    packed, scales = _blocks(list(range(-127, 126)))
    bits = mxfp4_to_bf16(packed, scales)
    values = (bits.astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_array_equal(values, dequantize_mxfp4(packed, scales))

"""E4M3, E2M1 and E8M0 are ml_dtypes' formats, bit for bit, but faster."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from dflash_trt.quantization.formats import (
    decode_e2m1,
    decode_e4m3,
    decode_e8m0,
    decode_packed_e2m1,
    encode_e2m1,
    encode_e4m3,
    encode_e8m0,
    pack_e2m1,
)

BYTES = np.arange(256, dtype=np.uint8)


def _near(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Every value, every midpoint between neighbours, and the floats around them, both signs."""
    ordered = np.unique(values)
    points = np.concatenate([ordered, (ordered[1:] + ordered[:-1]) / 2]).astype(np.float32)
    infinity = np.float32(np.inf)
    around = [points, np.nextafter(points, infinity), np.nextafter(points, -infinity)]
    return np.concatenate([*around, *(-part for part in around)])


def _any_floats(count: int) -> npt.NDArray[np.float32]:
    """Floats of any exponent, without NaN."""
    bits = np.random.default_rng(0).integers(0, 1 << 32, count, dtype=np.uint32)
    floats = bits.view(np.float32)
    return floats[~np.isnan(floats)]


def _same_bits(left: npt.NDArray[np.float32], right: npt.NDArray[np.float32]) -> None:
    np.testing.assert_array_equal(left.view(np.uint32), right.view(np.uint32))


def test_every_code_decodes_as_in_ml_dtypes() -> None:
    for decode, codes, dtype in (
        (decode_e4m3, BYTES, ml_dtypes.float8_e4m3fn),
        (decode_e2m1, BYTES[:16], ml_dtypes.float4_e2m1fn),
        (decode_e8m0, BYTES, ml_dtypes.float8_e8m0fnu),
    ):
        with np.errstate(invalid="ignore"):
            _same_bits(decode(codes), codes.view(dtype).astype(np.float32))
    assert decode_e2m1(BYTES[:8]).tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert decode_e8m0(BYTES[:1])[0] == 2.0**-127
    np.testing.assert_array_equal(encode_e8m0(np.arange(-127, 128, dtype=np.int32)), BYTES[:255])


def test_e4m3_rounds_as_ml_dtypes_does() -> None:
    finite = decode_e4m3(BYTES)[~np.isnan(decode_e4m3(BYTES))]
    evenly = np.linspace(-500, 500, 100_001, dtype=np.float32)
    values = np.concatenate([_near(finite), _any_floats(200_000), evenly])
    clipped = np.clip(values, -448, 448)
    expected = clipped.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    np.testing.assert_array_equal(encode_e4m3(values), expected)


def test_e2m1_rounds_as_ml_dtypes_does() -> None:
    evenly = np.linspace(-7, 7, 100_001, dtype=np.float32)
    values = np.concatenate([_near(decode_e2m1(BYTES[:16])), _any_floats(200_000), evenly])
    clipped = np.clip(values, -6, 6)
    expected = clipped.astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 15
    expected = np.where(values == 0, 0, expected)
    np.testing.assert_array_equal(encode_e2m1(values), expected)


@pytest.mark.parametrize("sign", [1, -1])
def test_what_is_not_finite(sign: int) -> None:
    infinite = np.array([sign * np.inf], np.float32)
    assert decode_e4m3(encode_e4m3(infinite))[0] == sign * 448
    assert decode_e2m1(encode_e2m1(infinite))[0] == sign * 6
    nan = np.array([sign * np.nan], np.float32)
    assert np.isnan(decode_e4m3(encode_e4m3(nan)))[0]


def test_packing_puts_even_columns_into_low_nibbles() -> None:
    codes = np.array([[1, 2, 15, 0]], np.uint8)
    assert pack_e2m1(codes).tolist() == [[0x21, 0x0F]]
    _same_bits(decode_packed_e2m1(pack_e2m1(codes)), decode_e2m1(codes))
    assert decode_packed_e2m1(BYTES.reshape(4, 64)).shape == (4, 128)

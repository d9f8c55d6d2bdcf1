"""FP8, NVFP4 and MXFP4 against their definitions, ModelOpt's classes and ml_dtypes."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import torch

from dflash_trt.quantization.codecs import (
    decode_e2m1,
    decode_e4m3,
    decode_e8m0,
    decode_packed_e2m1,
    dequantize_fp8,
    dequantize_nvfp4,
    encode_e2m1,
    encode_e4m3,
    fp8_scale,
    nvfp4_global_scale,
    pack_e2m1,
    quantize_fp8,
    quantize_int8,
    quantize_nvfp4,
)

Floats = npt.NDArray[np.float32]
SOURCES = [torch.float32, torch.bfloat16, torch.float16]


def _weights(dtype: torch.dtype, scale: float = 1.0, rows: int = 64, columns: int = 128) -> Floats:
    """Normal values of a checkpoint type as float32, with blocks of zeros and some outliers."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(rows, columns, generator=generator) * scale
    values[3] = 0
    values[5, :40] = 0
    values[7, 9] *= 20
    values[9, 1::2] = -0.0
    values[11, :16] *= 1e-6
    converted: Floats = values.to(dtype).float().numpy()
    return converted


def _amax(values: Floats) -> float:
    return float(np.abs(values).max())


@pytest.mark.parametrize("dtype", SOURCES)
@pytest.mark.parametrize("scale", [1.0, 1e-3, 300.0])
@pytest.mark.parametrize("others", [1.0, 1.7], ids=["own amax", "the group's amax"])
def test_nvfp4_is_modelopts(dtype: torch.dtype, scale: float, others: float) -> None:
    """`others`: the global scale is the largest of the linears that are fused."""
    qtensor = pytest.importorskip("modelopt.torch.quantization.qtensor")
    weights = _weights(dtype, scale)
    global_scale = nvfp4_global_scale(_amax(weights) * others)
    source = torch.from_numpy(weights).to(dtype)
    theirs, their_blocks, their_global = qtensor.NVFP4QTensor.quantize(
        source, 16, weights_scaling_factor_2=torch.tensor(_amax(weights) * others).float() / 2688.0
    )
    assert np.float32(their_global) == global_scale
    packed, blocks = quantize_nvfp4(weights, global_scale)
    np.testing.assert_array_equal(blocks, their_blocks.view(torch.uint8).numpy())
    np.testing.assert_array_equal(packed, theirs._quantized_data.numpy())
    values = dequantize_nvfp4(packed, blocks, global_scale)
    their_values = theirs.dequantize(
        torch.float32, scale=their_blocks, double_scale=their_global, block_sizes={-1: 16}
    )
    assert torch.equal(torch.from_numpy(values), their_values)
    assert np.linalg.norm(values - weights) < 0.12 * np.linalg.norm(weights)


@pytest.mark.parametrize("amax", [0.0, 1e-45, 1e-42])
def test_scales_that_would_be_zero(amax: float) -> None:
    """All-zero tensors, and those so small that their scale underflows, become zeros."""
    values = np.full((2, 32), amax, np.float32)
    four, eight = nvfp4_global_scale(amax), fp8_scale(amax)
    for scale, decoded in (
        (four, dequantize_nvfp4(*quantize_nvfp4(values, four), four)),
        (eight, dequantize_fp8(quantize_fp8(values, eight), eight)),
    ):
        assert scale > 0
        assert np.isfinite(decoded).all() and np.abs(decoded).max() <= 2 * amax


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


def test_packing_puts_even_columns_into_low_nibbles() -> None:
    codes = np.array([[1, 2, 15, 0]], np.uint8)
    assert pack_e2m1(codes).tolist() == [[0x21, 0x0F]]
    _same_bits(decode_packed_e2m1(pack_e2m1(codes)), decode_e2m1(codes))
    assert decode_packed_e2m1(BYTES.reshape(4, 64)).shape == (4, 128)


@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e-44, 1e37])
def test_int8_is_within_half_a_step(scale: float) -> None:
    """A block's ends by as much again: zero is exact, and they follow from it."""
    weights = _weights(torch.float32) * np.float32(scale)
    codes, steps, zeros = quantize_int8(weights)
    assert codes.shape == (64, 4, 32) and steps.shape == zeros.shape == (64, 4)
    blocks = weights.astype(np.float64).reshape(codes.shape)
    decoded = (codes.astype(np.float64) - zeros[..., None]) * steps[..., None]
    inner = np.abs(blocks - decoded) <= 0.5001 * steps[..., None]
    ends = (codes == 0) | (codes == 255)
    assert np.all(inner | ends) and np.all(np.abs(blocks - decoded) <= 1.01 * steps[..., None])
    assert np.all(decoded[blocks == 0] == 0)

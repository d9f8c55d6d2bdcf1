"""The graphs' arithmetic is the codecs': `dflash_trt.quantization` defines what the bodies say."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dflash_trt.graph.quantized import LinearFormat
from dflash_trt.quantization import fp8, nvfp4
from tests.graph.linears import (
    INPUT_SCALES,
    LINEAR_FORMATS,
    decode,
    identity_body,
    random_linear,
    rows_of_all_kinds,
)


@pytest.mark.parametrize("input_scale", INPUT_SCALES, ids=str)
@pytest.mark.parametrize("algorithm", LINEAR_FORMATS)
def test_activations(algorithm: LinearFormat, input_scale: np.float32, tmp_path: Path) -> None:
    x = rows_of_all_kinds(32)
    codec = {"FP8": fp8.quantize_activation_fp8, "NVFP4": nvfp4.quantize_activation_nvfp4}
    got = identity_body(algorithm, 32, input_scale, tmp_path / "linear.onnx")(x)
    np.testing.assert_array_equal(got, codec[algorithm](x, input_scale))


@pytest.mark.parametrize("algorithm", LINEAR_FORMATS)
def test_weights(algorithm: LinearFormat) -> None:
    """The other half, the body against this decoding, is in test_quantized.py."""
    linear = random_linear(algorithm, 48, 128)
    if algorithm == "FP8":
        codes = linear["weight"].view(np.uint8)
        values = fp8.dequantize_fp8(codes, linear["weight_scale"])
    else:
        scales = linear["weight_scale"].view(np.uint8)
        values = nvfp4.dequantize_nvfp4(linear["weight"], scales, linear["weight_scale_2"])
    np.testing.assert_array_equal(values, decode(algorithm, linear))

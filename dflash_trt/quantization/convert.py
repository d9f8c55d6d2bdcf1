"""One linear of a checkpoint in the tensors of ModelOpt's unified Hugging Face layout."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from dflash_trt.checkpoints.safetensors_header import ITEM_BYTES
from dflash_trt.core.formats import NVFP4_BLOCK
from dflash_trt.quantization.fp8 import dequantize_fp8, quantize_fp8
from dflash_trt.quantization.linears import Algorithm, Linear
from dflash_trt.quantization.nvfp4 import dequantize_nvfp4, quantize_nvfp4
from dflash_trt.quantization.rows import iterate_rows, sum_of_squares
from dflash_trt.quantization.scales import Scales
from dflash_trt.quantization.shards import ShardWriter, TensorLayout


def linear_layout(linear: Linear, algorithm: Algorithm) -> list[TensorLayout]:
    """What is written in place of a linear's weight."""
    rows, columns = linear.weight.shape
    name, module = linear.weight.name, linear.module
    scalars = [f"{module}.input_scale"]
    if algorithm is Algorithm.FP8:
        tensors = [TensorLayout(name, "F8_E4M3", (rows, columns))]
        scalars.append(f"{module}.weight_scale")
    else:
        tensors = [
            TensorLayout(name, "U8", (rows, columns // 2)),
            TensorLayout(f"{module}.weight_scale", "F8_E4M3", (rows, columns // NVFP4_BLOCK)),
        ]
        scalars.append(f"{module}.weight_scale_2")
    return tensors + [TensorLayout(scalar, "F32", ()) for scalar in scalars]


def write_linear(
    linear: Linear,
    algorithm: Algorithm,
    scales: Scales,
    shard: ShardWriter,
    on_bytes: Callable[[int], None],
) -> float:
    """Quantises a weight into `shard`, some rows at a time.

    Returns the relative Frobenius error |W' - W| / |W|, 0 where W is all zeros.
    """
    name, module = linear.weight.name, linear.module
    error = norm = 0.0
    for rows in iterate_rows(linear.weight):
        if algorithm is Algorithm.FP8:
            codes = quantize_fp8(rows, scales.weight)
            decoded = dequantize_fp8(codes, scales.weight)
        else:
            codes, blocks = quantize_nvfp4(rows, scales.weight)
            decoded = dequantize_nvfp4(codes, blocks, scales.weight)
            shard.write(f"{module}.weight_scale", blocks)
        shard.write(name, codes)
        decoded -= rows
        error += sum_of_squares(decoded)
        norm += sum_of_squares(rows)
        on_bytes(rows.size * ITEM_BYTES[linear.weight.dtype])
    per_tensor = "weight_scale" if algorithm is Algorithm.FP8 else "weight_scale_2"
    shard.write(f"{module}.{per_tensor}", np.asarray(scales.weight, "<f4").tobytes())
    shard.write(f"{module}.input_scale", np.asarray(scales.input, "<f4").tobytes())
    return math.sqrt(error / norm) if norm else 0.0

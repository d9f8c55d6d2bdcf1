"""The target's embedding and output head, which a draft borrows, as PyTorch tensors."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from dflash_trt.checkpoints.quantized_weights import WEIGHT_SCALE, WEIGHT_SCALE_2, read_scalar
from dflash_trt.checkpoints.safetensors_header import TensorEntry
from dflash_trt.checkpoints.target import TargetSpec
from dflash_trt.quantization.fp8 import dequantize_fp8
from dflash_trt.quantization.nvfp4 import dequantize_nvfp4

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_CHUNK = 16 << 20
_HEAD = "lm_head"


def load_embedding_and_head(target: TargetSpec) -> tuple[Tensor, Tensor]:
    """[V, H] float32 each; the same tensor where they are tied.

    A quantised head is decoded: those are the weights that serving multiplies with.
    """
    embedding = _float_weight(target.weights["embed_tokens"])
    if target.tie_word_embeddings:
        return embedding, embedding
    return embedding, _head(target)


def _head(target: TargetSpec) -> Tensor:
    weights = target.weights
    entry = weights[_HEAD]
    if entry.dtype in _DTYPES:
        return _float_weight(entry)
    codes = _codes(entry)
    if entry.dtype == "F8_E4M3":
        scale = np.float32(read_scalar(weights[f"{_HEAD}.{WEIGHT_SCALE}"]))
        return torch.from_numpy(dequantize_fp8(codes, scale))
    blocks = _codes(weights[f"{_HEAD}.{WEIGHT_SCALE}"])
    scale = np.float32(read_scalar(weights[f"{_HEAD}.{WEIGHT_SCALE_2}"]))
    return torch.from_numpy(dequantize_nvfp4(codes, blocks, scale))


def _bytes(entry: TensorEntry) -> bytearray:
    data = bytearray()
    for piece in entry.pieces(_CHUNK):
        data += piece
    return data


def _float_weight(entry: TensorEntry) -> Tensor:
    stored = torch.frombuffer(_bytes(entry), dtype=_DTYPES[entry.dtype])
    return stored.reshape(entry.shape).float()


def _codes(entry: TensorEntry) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    return np.frombuffer(_bytes(entry), np.uint8).reshape(entry.shape)

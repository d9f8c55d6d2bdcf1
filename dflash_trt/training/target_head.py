"""What a draft borrows of its target, as PyTorch tensors: embedding, last norm and head."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from dflash_trt.models.quantized_weights import WEIGHT_SCALE, WEIGHT_SCALE_2, read_scalar
from dflash_trt.models.safetensors_header import TensorEntry
from dflash_trt.models.target import TargetSpec
from dflash_trt.quantization.codecs import dequantize_fp8, dequantize_nvfp4

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_CHUNK = 16 << 20
_HEAD = "lm_head"


@dataclass(frozen=True, slots=True)
class TargetEnds:
    """A target's first and last weights, float32.

    Args:
        embedding, head: [V, H]; the same tensor where they are tied.
        norm: [H], before the head; `eps` is its.
        embedding_scale: what the stored embedding is multiplied by in `embedding`.
        logit_cap: c of logits c·tanh(l/c); None where they have none.
    """

    embedding: Tensor
    head: Tensor
    norm: Tensor
    eps: float
    embedding_scale: float = 1.0
    logit_cap: float | None = None

    def states(self, stream: Tensor) -> Tensor:
        """What the head reads of the last layer's residual stream [..., H]; float32."""
        norm = self.norm.to(stream.device)
        return functional.rms_norm(stream.float(), norm.shape, norm, self.eps)


def load_ends(target: TargetSpec) -> TargetEnds:
    """Reads them; a quantised head is decoded: those are the weights that serving multiplies."""
    embedding = _float_weight(target.weights["embed_tokens"])
    head = embedding if target.tie_word_embeddings else _head(target)
    norm = _float_weight(target.weights["norm"]) + target.norm_offset
    if target.embedding_scale != 1.0:
        embedding = embedding * target.embedding_scale
    scale, cap = target.embedding_scale, target.logit_cap
    return TargetEnds(embedding, head, norm, target.rms_norm_eps, scale, cap)


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

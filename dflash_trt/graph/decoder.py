"""What the graphs of a target and of a draft have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from dflash_trt.checkpoints.folder import Checkpoint
from dflash_trt.checkpoints.quantization import Quantization
from dflash_trt.checkpoints.safetensors_header import TensorEntry


class Decoder(Protocol):
    """The dimensions that a target and a draft have in common, and where their tensors are."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def rms_norm_eps(self) -> float: ...
    @property
    def weights(self) -> Mapping[str, TensorEntry]: ...
    @property
    def quantization(self) -> Quantization | None: ...
    @property
    def checkpoint(self) -> Checkpoint: ...

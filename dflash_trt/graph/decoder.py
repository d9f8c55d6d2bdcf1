"""What the graphs of a target and of a draft have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
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
    def layer_windows(self) -> tuple[int | None, ...]: ...
    @property
    def rms_norm_eps(self) -> float: ...
    @property
    def weights(self) -> Mapping[str, TensorEntry]: ...
    @property
    def quantization(self) -> Quantization | None: ...
    @property
    def checkpoint(self) -> Checkpoint: ...


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """One layer's attention; see the specs for windows and causality."""

    heads: int
    kv_heads: int
    head_dim: int
    window: int | None
    is_causal: bool
    has_sinks: bool


def layer_sizes(spec: Decoder, index: int) -> LayerSizes:
    """What layer `index` of a model is sized by: the only place that asks a spec."""
    causal = getattr(spec, "layer_causal", None)
    return LayerSizes(
        spec.num_heads,
        spec.num_kv_heads,
        spec.head_dim,
        spec.layer_windows[index],
        True if causal is None else causal[index],
        f"layers.{index}.sinks" in spec.weights,
    )

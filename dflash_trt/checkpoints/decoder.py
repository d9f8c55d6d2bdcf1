"""What a target and a draft have in common: sizes, positions, and where their tensors are."""

from __future__ import annotations

from dataclasses import dataclass

from dflash_trt.checkpoints.config_fields import ConfigFields
from dflash_trt.checkpoints.families import Activation
from dflash_trt.checkpoints.folder import Checkpoint
from dflash_trt.checkpoints.quantization import Quantization
from dflash_trt.checkpoints.rope import LEAST, RopeSpec
from dflash_trt.checkpoints.safetensors_header import TensorEntry
from dflash_trt.checkpoints.sizes import DecoderSizes, Windows

LOGIT_CAP = "final_logit_softcapping"


def read_logit_cap(config: ConfigFields) -> float | None:
    """The cap of logits that a config states; DflashError for none that is a number above 0."""
    return config.number(LOGIT_CAP, low=LEAST) if config.has(LOGIT_CAP) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """A decoder of a checkpoint; `rms_norm_eps` is added to the mean square.

    `weights` maps roles ("norm", "layers.{i}.q_proj" …) to tensors. Norms multiply by
    `norm_offset` + w. Layers with a window turn by `local_rope` where it is given. Queries are
    multiplied by `query_scale`, 1/sqrt(D) where it is None. RoPE turns the first `rotary_dim`
    elements of a head, all where it is None. Logits l become c·tanh(l/c) of `logit_cap` c.
    """

    sizes: DecoderSizes
    rms_norm_eps: float
    rope: RopeSpec
    max_position_embeddings: int
    weights: dict[str, TensorEntry]
    quantization: Quantization | None
    checkpoint: Checkpoint
    norm_offset: float = 0.0
    embedding_scale: float = 1.0
    activation: Activation = "silu"
    local_rope: RopeSpec | None = None
    query_scale: float | None = None
    rotary_dim: int | None = None
    logit_cap: float | None = None

    @property
    def hidden_size(self) -> int:
        return self.sizes.hidden_size

    @property
    def num_layers(self) -> int:
        return len(self.sizes.layers)

    @property
    def head_dim(self) -> int:
        return self.sizes.layer.head_dim

    @property
    def layer_windows(self) -> Windows:
        return self.sizes.windows

    @property
    def layer_causal(self) -> tuple[bool, ...]:
        return tuple(layer.is_causal for layer in self.sizes.layers)

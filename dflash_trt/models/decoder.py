"""What a target and a draft have in common: sizes, positions, and where their tensors are."""

from __future__ import annotations

from dataclasses import dataclass

from dflash_trt.models.config_fields import ConfigFields
from dflash_trt.models.families import Activation
from dflash_trt.models.folder import Checkpoint
from dflash_trt.models.quantization import Quantization
from dflash_trt.models.rope import LEAST, RopeSpec
from dflash_trt.models.safetensors_header import TensorEntry
from dflash_trt.models.sizes import (
    MAX_HEADS,
    MAX_LAYERS,
    MAX_WIDTH,
    DecoderSizes,
    LayerSizes,
    ModelShape,
    Windows,
)

LOGIT_CAP = "final_logit_softcapping"


def read_logit_cap(config: ConfigFields) -> float | None:
    """The cap of logits that a config states; DflashError for none that is a number above 0."""
    return config.number(LOGIT_CAP, low=LEAST) if config.has(LOGIT_CAP) else None


@dataclass(frozen=True, kw_only=True)
class DecoderSpec(ModelShape):
    """A decoder of a checkpoint: its shape with its weights.

    `weights` maps roles ("norm", "layers.{i}.q_proj" …) to tensors. `rms_norm_eps` is added to the
    mean square, and norms multiply by `norm_offset` + w. Layers with a window turn by `local_rope`
    where it is given. Queries are multiplied by `query_scale`, 1/sqrt(D) where it is None. RoPE
    turns the first `rotary_dim` elements of a head, all where it is None. Logits l, times
    `logit_multiplier`, become c·tanh(l/c) of `logit_cap` c.
    """

    rms_norm_eps: float
    rope: RopeSpec
    weights: dict[str, TensorEntry]
    quantization: Quantization | None
    checkpoint: Checkpoint
    norm_offset: float = 0.0
    embedding_scale: float = 1.0
    activation: Activation = "silu"
    local_rope: RopeSpec | None = None
    query_scale: float | None = None
    rotary_dim: int | None = None
    logit_multiplier: float = 1.0
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


def read_sizes(
    config: ConfigFields,
    default_head_dim: int | None,
    activation: Activation = "silu",
    mlp_key: str = "intermediate_size",
) -> DecoderSizes:
    """Sizes, each checked and against each other; experts and windows are not read.

    `default_head_dim` is the family's for a config that states none; None means
    hidden_size / num_attention_heads. `mlp_key` has the width of the MLP.
    """
    hidden = config.integer("hidden_size", high=MAX_WIDTH)
    heads = config.integer("num_attention_heads", high=MAX_HEADS)
    kv_heads = config.integer("num_key_value_heads", heads, high=MAX_HEADS)
    if heads % kv_heads:
        rule = f"must be a multiple of num_key_value_heads ({kv_heads})"
        raise config.error("num_attention_heads", rule)
    if not config.has("head_dim") and default_head_dim is None and hidden % heads:
        rule = f"must be a multiple of num_attention_heads ({heads}) where head_dim is not given"
        raise config.error("hidden_size", rule)
    head_dim = config.integer("head_dim", default_head_dim or hidden // heads, high=MAX_WIDTH)
    if head_dim % 2:
        raise config.error("head_dim", f"must be even for RoPE, not {head_dim}")
    key, name = ("hidden_act", "silu")
    if activation == "gelu_tanh":
        key, name = ("hidden_activation", "gelu_pytorch_tanh")
    if config.text(key, name) != name:
        raise config.unsupported(key, f"only {name} is")
    layers = config.integer("num_hidden_layers", high=MAX_LAYERS)
    return DecoderSizes(
        hidden_size=hidden,
        intermediate_size=config.integer(mlp_key, high=MAX_WIDTH),
        layers=(LayerSizes(heads, kv_heads, head_dim),) * layers,
    )

"""The sizes that every decoder, target or draft, states in its config."""

from __future__ import annotations

from dataclasses import dataclass

from dflash_trt.checkpoints.config_fields import ConfigFields

MAX_LAYERS = 1024
MAX_WIDTH = 2**24
MAX_HEADS = 2**14


@dataclass(frozen=True, slots=True)
class DecoderDims:
    """Sizes in elements; `rms_norm_eps` is added to the mean square."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    max_position_embeddings: int

    def symbols(self) -> dict[str, int]:
        """The names that weight shapes are written in."""
        return {
            "hidden": self.hidden_size,
            "heads": self.num_heads,
            "kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "intermediate": self.intermediate_size,
        }


def read_dims(config: ConfigFields, default_head_dim: int | None) -> DecoderDims:
    """Sizes, checked on their own and against each other.

    `default_head_dim` is what the family takes when the config states none; None means
    hidden_size / num_attention_heads.
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
    if config.text("hidden_act", "silu") != "silu":
        raise config.unsupported("hidden_act", "only silu is")
    return DecoderDims(
        hidden_size=hidden,
        num_layers=config.integer("num_hidden_layers", high=MAX_LAYERS),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=config.integer("intermediate_size", high=MAX_WIDTH),
        rms_norm_eps=config.number("rms_norm_eps", 1e-6, high=1.0),
        max_position_embeddings=config.integer("max_position_embeddings"),
    )

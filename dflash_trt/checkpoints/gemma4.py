"""What a Gemma 4's config says beyond any other's: heads of two kinds, and what is refused."""

from __future__ import annotations

from dataclasses import replace

from dflash_trt.checkpoints.config_fields import ConfigFields
from dflash_trt.checkpoints.families import GEMMA4_MIXTURE, Family
from dflash_trt.checkpoints.sizes import MAX_HEADS, MAX_WIDTH, DecoderSizes, LayerSizes

FULL_HEAD_DIM = 512
"""transformers' own where the config is silent."""
BY_LAYER = "per_layer_config"
OF_SMALL_ONES = ("hidden_size_per_layer_input", "num_kv_shared_layers", "use_double_wide_mlp")
"""Keys of what E2B and E4B have beyond the larger ones."""


def refuse_relatives(config: ConfigFields) -> None:
    """Raises DflashError for E2B and E4B, and for attention both ways."""
    for key in OF_SMALL_ONES:
        if config.values.get(key) not in (None, False, 0):
            fix = "Gemma 4 E2B and E4B, which have it, cannot be targets here"
            raise config.unsupported(key, fix)
    if config.values.get("use_bidirectional_attention") not in (None, "vision"):
        fix = "texts must be causal, as with null or vision"
        raise config.unsupported("use_bidirectional_attention", fix)


def with_experts(family: Family, config: ConfigFields) -> Family:
    """`family`, of a Gemma 4 with experts where its config says so."""
    has_them = family.is_gemma4 and config.flag("enable_moe_block", False)
    return replace(family, experts=GEMMA4_MIXTURE) if has_them else family


def read_heads_by_kind(config: ConfigFields, sizes: DecoderSizes) -> DecoderSizes:
    """`sizes` with windows, with the heads of layers that see everything.

    Raises:
        DflashError: heads that do not divide, or a last layer that slides.
    """
    if sizes.layers[-1].window is not None:
        raise config.error("layer_types", "must end with full_attention")
    slides, kv_heads = sizes.layer, sizes.layer.kv_heads
    keys_are_values = config.flag("attention_k_eq_v", False)
    fields, size_key, heads_key = config, "global_head_dim", "num_global_key_value_heads"
    default, has_heads = FULL_HEAD_DIM, keys_are_values
    if config.has(BY_LAYER):
        fields = _of_full_layers(config, sizes)
        size_key, heads_key = "head_dim", "num_key_value_heads"
        default, has_heads = slides.head_dim, True
    if has_heads:
        kv_heads = fields.integer(heads_key, kv_heads, high=MAX_HEADS)
        if slides.heads % kv_heads:
            raise fields.error(heads_key, f"must divide num_attention_heads ({slides.heads})")
    head_dim = fields.integer(size_key, default, high=MAX_WIDTH)
    if head_dim % 2:
        raise fields.error(size_key, f"must be even for RoPE, not {head_dim}")
    full = LayerSizes(slides.heads, kv_heads, head_dim, keys_are_values=keys_are_values)
    return sizes.with_full(full)


def _of_full_layers(config: ConfigFields, sizes: DecoderSizes) -> ConfigFields:
    """What transformers 5 writes of each layer that sees everything, and of no other."""
    stated = config.child(BY_LAYER)
    full = [str(i) for i, layer in enumerate(sizes.layers) if layer.window is None]
    first = stated.child(full[0])
    if sorted(stated.values) != sorted(full) or any(
        one != first.values for one in stated.values.values()
    ):
        raise config.unsupported(BY_LAYER, "layers of full_attention must be alike, and no others")
    return first

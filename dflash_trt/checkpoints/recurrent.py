"""Which layers of a hybrid have no attention, and how large they are."""

from __future__ import annotations

from dflash_trt.checkpoints.config_fields import ConfigFields
from dflash_trt.checkpoints.layer_types import FULL
from dflash_trt.checkpoints.sizes import MAX_HEADS, MAX_WIDTH, RecurrentSizes

LINEAR = "linear_attention"
FULL_INTERVAL = 4
"""Every so many layers one has attention, where `layer_types` does not say which."""
KERNEL = 4


def read_recurrent(config: ConfigFields, num_layers: int) -> tuple[RecurrentSizes | None, ...]:
    """The recurrent layers of a Qwen3.5 config, in their places; None where there is attention.

    Raises:
        DflashError: layer kinds that are not those two, not one of each, or not one for each
            layer; heads that do not divide, or of two sizes.
    """
    if not config.flag("attn_output_gate", True):
        raise config.unsupported("attn_output_gate", "it must be true")
    kinds = _read_kinds(config, num_layers)
    key_heads = config.integer("linear_num_key_heads", 16, high=MAX_HEADS)
    value_heads = config.integer("linear_num_value_heads", 32, high=MAX_HEADS)
    if value_heads % key_heads:
        rule = f"must be a multiple of linear_num_key_heads ({key_heads})"
        raise config.error("linear_num_value_heads", rule)
    head_dim = config.integer("linear_key_head_dim", 128, high=MAX_WIDTH)
    if config.integer("linear_value_head_dim", 128, high=MAX_WIDTH) != head_dim:
        fix = f"only linear_key_head_dim ({head_dim}) is"
        raise config.unsupported("linear_value_head_dim", fix)
    kernel = config.integer("linear_conv_kernel_dim", KERNEL, low=2, high=64)
    sizes = RecurrentSizes(key_heads, value_heads, head_dim, kernel)
    return tuple(sizes if kind == LINEAR else None for kind in kinds)


def _read_kinds(config: ConfigFields, num_layers: int) -> list[str]:
    if not config.has("layer_types"):
        interval = config.integer("full_attention_interval", FULL_INTERVAL)
        kinds = [LINEAR if (i + 1) % interval else FULL for i in range(num_layers)]
    else:
        stated = config.values["layer_types"]
        if not isinstance(stated, list) or len(stated) != num_layers:
            raise config.error("layer_types", f"must be a list of {num_layers} layer kinds")
        kinds = stated
    if set(map(str, kinds)) != {LINEAR, FULL}:
        raise config.error("layer_types", f"must hold {LINEAR} and {FULL}, and nothing else")
    return kinds

"""What each layer is, as configs state it: windows, causality, recurrence, heads of two kinds.

A target's rules are those of transformers' families, defaults included: a silent config means what
they make of it. A draft's are those of z-lab's reference model and of vLLM's DFlash loader: full
layers see the whole block in both directions; layers that `layer_types` marks as sliding are causal
unless the config says otherwise; `dflash_config.use_swa` slides every layer, both ways.
"""

from __future__ import annotations

from dataclasses import replace

from dflash_trt.models.config_fields import ConfigFields
from dflash_trt.models.families import GEMMA4_MIXTURE, Family
from dflash_trt.models.sizes import (
    MAX_HEADS,
    MAX_WIDTH,
    DecoderSizes,
    LayerSizes,
    RecurrentSizes,
    Windows,
)

FULL = "full_attention"
SLIDING = "sliding_attention"
LINEAR = "linear_attention"
FULL_INTERVAL = 4
"""Every so many layers one has attention, where `layer_types` does not say which."""
KERNEL = 4
MISTRAL_WINDOW = 4096
"""A Mistral config without the key has it; null says that there is none."""
GEMMA_PERIOD = 6
"""Of so many layers of a Gemma the last sees everything."""
FIRST_QWEN2_WINDOW = 28
"""`max_window_layers` of a Qwen2 config that slides and does not state it."""
FULL_HEAD_DIM = 512
"""transformers' own where the config is silent."""
BY_LAYER = "per_layer_config"
OF_SMALL_ONES = ("hidden_size_per_layer_input", "num_kv_shared_layers", "use_double_wide_mlp")
"""Keys of what E2B and E4B have beyond the larger ones."""


def read_layers(config: ConfigFields, family: Family, sizes: DecoderSizes) -> DecoderSizes:
    """`sizes` with what a target's config says of each layer; DflashError where it makes no sense.

    Args:
        sizes: of layers that are all alike.
    """
    if family.is_hybrid:
        return sizes.with_recurrence(read_recurrent(config, len(sizes.layers)))
    windows = read_windows(config, family, len(sizes.layers))
    sizes = sizes.with_layers(windows, has_sinks=family.has_sinks)
    return read_heads_by_kind(config, sizes) if family.is_gemma4 else sizes


def read_windows(config: ConfigFields, family: Family, num_layers: int) -> Windows:
    """Per layer, None where it sees everything; DflashError where the family has no such layers."""
    match family.windows:
        case "alternate":
            kinds = [FULL if i % 2 else SLIDING for i in range(num_layers)]
        case "pattern":
            period = config.integer("sliding_window_pattern", GEMMA_PERIOD)
            kinds = [SLIDING if (i + 1) % period else FULL for i in range(num_layers)]
        case "qwen2" if config.flag("use_sliding_window", False):
            first = config.integer("max_window_layers", FIRST_QWEN2_WINDOW, low=0)
            kinds = [SLIDING if i >= first else FULL for i in range(num_layers)]
        case "every":
            # transformers reads `sliding_window` alone.
            window = MISTRAL_WINDOW if "sliding_window" not in config.values else None
            if config.has("sliding_window"):
                window = config.integer("sliding_window")
            _check_same(config, FULL if window is None else SLIDING)
            return (window,) * num_layers
        case _:
            _check_same(config, FULL)
            return (None,) * num_layers
    if config.has("layer_types"):
        kinds = read_layer_types(config, num_layers)
    window = config.integer("sliding_window") if SLIDING in kinds else None
    return tuple(window if kind == SLIDING else None for kind in kinds)


def _check_same(config: ConfigFields, kind: str) -> None:
    """Every entry of `layer_types`, if there are any, is `kind`."""
    kinds = config.values.get("layer_types") or []
    if not isinstance(kinds, list) or any(one != kind for one in kinds):
        raise config.unsupported("layer_types", f"a target's layers must all be {kind}")


def read_layer_types(config: ConfigFields, num_layers: int, other: str = SLIDING) -> list[str]:
    """The kind of each layer; DflashError where the list is not `num_layers` known kinds."""
    kinds = config.values["layer_types"]
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise config.error("layer_types", f"must be a list of {num_layers} layer kinds")
    if any(kind not in (FULL, other) for kind in kinds):
        raise config.error("layer_types", f"must hold only {FULL} and {other}")
    return kinds


def read_layer_attention(
    config: ConfigFields, inner: ConfigFields, num_layers: int
) -> tuple[Windows, tuple[bool, ...]]:
    """Window (None: everything) and causality of each draft layer.

    Raises DflashError for a causal draft or an inconsistent window.
    """
    places = ((inner, "causal"), (config, "is_causal"))
    for fields, key in places:
        if fields.flag(key, False):
            fix = "a draft that is causal inside the block (as JetSpec's) is not DFlash"
            raise fields.unsupported(key, fix)
    is_silent = not any(fields.has(key) for fields, key in places)
    kinds = [FULL] * num_layers
    if config.has("layer_types"):
        kinds = read_layer_types(config, num_layers)
    elif config.flag("use_sliding_window", False) and config.has("sliding_window"):
        # What transformers' Qwen3 config derives.
        first = config.integer("max_window_layers", FIRST_QWEN2_WINDOW, low=0)
        kinds = [SLIDING if i >= first else FULL for i in range(num_layers)]
    sliding = [kind == SLIDING for kind in kinds]
    causal = tuple(is_sliding and is_silent for is_sliding in sliding)
    if not any(sliding):
        sliding = [inner.flag("use_swa", False)] * num_layers
    elif not config.flag("use_sliding_window", True):
        # transformers drops sliding_window when this is false, so the two contradict.
        raise config.error("use_sliding_window", "must be true where layer_types slide")
    if not any(sliding):
        return (None,) * num_layers, causal
    if not inner.has("swa_window_size"):
        window = config.integer("sliding_window")
    else:
        window = inner.integer("swa_window_size")
        if config.has("sliding_window") and config.integer("sliding_window") != window:
            rule = f"must equal the top level's sliding_window {config.values['sliding_window']}"
            raise inner.error("swa_window_size", rule)
    return tuple(window if is_sliding else None for is_sliding in sliding), causal


def read_recurrent(config: ConfigFields, num_layers: int) -> tuple[RecurrentSizes | None, ...]:
    """The recurrent layers of a Qwen3.5 config, in their places; None where there is attention.

    Raises:
        DflashError: layer kinds that are not those two, not one of each, or not one for each
            layer; heads that do not divide, or of two sizes.
    """
    if not config.flag("attn_output_gate", True):
        raise config.unsupported("attn_output_gate", "it must be true")
    interval = config.integer("full_attention_interval", FULL_INTERVAL)
    kinds = [LINEAR if (i + 1) % interval else FULL for i in range(num_layers)]
    if config.has("layer_types"):
        kinds = read_layer_types(config, num_layers, LINEAR)
    if set(kinds) != {LINEAR, FULL}:
        raise config.error("layer_types", f"must hold {LINEAR} and {FULL}, and nothing else")
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
    if BY_LAYER in config.values:
        # What transformers 5 writes of each layer that is unlike the model; of none, null or {}.
        stated = config.child(BY_LAYER)
        full_ones = [str(i) for i, layer in enumerate(sizes.layers) if layer.window is None]
        usual = {"head_dim": slides.head_dim, "num_key_value_heads": slides.kv_heads}
        apart = {i: stated.child(i).values for i in stated.values}
        apart = {i: one for i, one in apart.items() if not one.items() <= usual.items()}
        fields = stated.child(full_ones[0])
        if apart and apart != dict.fromkeys(full_ones, fields.values):
            fix = "layers of full_attention must be alike, and no others"
            raise config.unsupported(BY_LAYER, fix)
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

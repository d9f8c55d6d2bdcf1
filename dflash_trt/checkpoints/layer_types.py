"""Which layers attend through a sliding window, and which draft layers are causal in the block.

The rules for drafts are those of z-lab's reference model and of vLLM's DFlash loader: full layers
see the whole block in both directions; layers that `layer_types` marks as sliding are causal
unless the config says otherwise; `dflash_config.use_swa` slides every layer, both ways.
"""

from __future__ import annotations

from dflash_trt.checkpoints.config_fields import ConfigFields
from dflash_trt.checkpoints.sizes import Windows

FULL = "full_attention"
SLIDING = "sliding_attention"


def read_layer_types(config: ConfigFields, num_layers: int) -> list[str]:
    """The kind of each layer; DflashError where the list is not `num_layers` known kinds."""
    kinds = config.values["layer_types"]
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise config.error("layer_types", f"must be a list of {num_layers} layer kinds")
    if any(kind not in (FULL, SLIDING) for kind in kinds):
        raise config.error("layer_types", f"must hold only {FULL} and {SLIDING}")
    return kinds


def read_layer_attention(
    config: ConfigFields, inner: ConfigFields, num_layers: int
) -> tuple[Windows, tuple[bool, ...]]:
    """Window (None: everything) and causality of each draft layer.

    Raises DflashError for a causal draft or an inconsistent window.
    """
    is_silent = _is_causality_unstated(config, inner)
    kinds = _read_draft_layer_types(config, num_layers)
    if SLIDING in kinds:
        if not config.flag("use_sliding_window", True):
            # transformers drops sliding_window when this is false, so the two contradict.
            raise config.error("use_sliding_window", "must be true where layer_types slide")
        sliding = [kind == SLIDING for kind in kinds]
        causal = tuple(is_sliding and is_silent for is_sliding in sliding)
    else:
        sliding = [inner.flag("use_swa", False)] * num_layers
        causal = (False,) * num_layers
    window = _read_window(config, inner) if any(sliding) else None
    return tuple(window if is_sliding else None for is_sliding in sliding), causal


def _is_causality_unstated(config: ConfigFields, inner: ConfigFields) -> bool:
    places = ((inner, "causal"), (config, "is_causal"))
    for fields, key in places:
        if fields.flag(key, False):
            fix = "a draft that is causal inside the block (as JetSpec's) is not DFlash"
            raise fields.unsupported(key, fix)
    return not any(fields.has(key) for fields, key in places)


def _read_draft_layer_types(config: ConfigFields, num_layers: int) -> list[str]:
    if config.has("layer_types"):
        return read_layer_types(config, num_layers)
    # What transformers' Qwen3 config derives.
    if not config.flag("use_sliding_window", False) or not config.has("sliding_window"):
        return [FULL] * num_layers
    first = config.integer("max_window_layers", 28, low=0)
    return [SLIDING if i >= first else FULL for i in range(num_layers)]


def _read_window(config: ConfigFields, inner: ConfigFields) -> int:
    if not inner.has("swa_window_size"):
        return config.integer("sliding_window")
    window = inner.integer("swa_window_size")
    if config.has("sliding_window") and config.integer("sliding_window") != window:
        stated = config.values["sliding_window"]
        raise inner.error("swa_window_size", f"must equal the top level's sliding_window {stated}")
    return window

"""Which draft layers attend through a sliding window, and which are causal inside the block.

The rules are those of z-lab's reference model and of vLLM's DFlash loader: full layers see
the whole block in both directions; layers that `layer_types` marks as sliding are causal
unless the config says otherwise; `dflash_config.use_swa` slides every layer, both ways.
"""

from __future__ import annotations

from dataclasses import dataclass

from dflash_trt.checkpoints.config_fields import ConfigFields
from dflash_trt.checkpoints.layer_types import FULL, SLIDING, read_layer_types


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """Per draft layer: the window in positions (None: everything), and causality."""

    windows: tuple[int | None, ...]
    causal: tuple[bool, ...]


def read_layer_attention(
    config: ConfigFields, inner: ConfigFields, num_layers: int
) -> LayerAttention:
    """Attention of each layer; DflashError for a causal draft or an inconsistent window."""
    explicit = _read_causal(config, inner)
    kinds = _read_layer_types(config, num_layers)
    if SLIDING in kinds:
        if not config.flag("use_sliding_window", True):
            # transformers drops sliding_window when this is false, so the two contradict.
            raise config.error("use_sliding_window", "must be true where layer_types slide")
        sliding = [kind == SLIDING for kind in kinds]
        causal = [is_sliding and explicit is None for is_sliding in sliding]
    else:
        sliding = [inner.flag("use_swa", False)] * num_layers
        causal = [False] * num_layers
    window = _read_window(config, inner) if any(sliding) else None
    return LayerAttention(
        tuple(window if is_sliding else None for is_sliding in sliding), tuple(causal)
    )


def _read_causal(config: ConfigFields, inner: ConfigFields) -> bool | None:
    """What the config states for all layers: False, or None when it is silent."""
    for fields, key in ((inner, "causal"), (config, "is_causal")):
        if fields.flag(key, False):
            fix = "a draft that is causal inside the block (as JetSpec's) is not DFlash"
            raise fields.unsupported(key, fix)
    return False if inner.has("causal") or config.has("is_causal") else None


def _read_layer_types(config: ConfigFields, num_layers: int) -> list[str]:
    if not config.has("layer_types"):
        return _implied_layer_types(config, num_layers)
    return read_layer_types(config, num_layers)


def _implied_layer_types(config: ConfigFields, num_layers: int) -> list[str]:
    """What transformers' Qwen3 config derives where `layer_types` is absent."""
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

"""Which layers of a target attend through a sliding window.

As in the configurations of transformers' families, defaults included: a config that is silent
means what they make of it.
"""

from __future__ import annotations

from dflash_trt.checkpoints.config_fields import ConfigFields
from dflash_trt.checkpoints.families import Family
from dflash_trt.checkpoints.layer_types import FULL, SLIDING, read_layer_types
from dflash_trt.checkpoints.sizes import Windows

MISTRAL_WINDOW = 4096
"""A Mistral config without the key has it; null says that there is none."""
GEMMA_PERIOD = 6
"""Of so many layers of a Gemma the last sees everything."""
FIRST_QWEN2_WINDOW = 28
"""`max_window_layers` of a Qwen2 config that slides and does not state it."""


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
            return _read_every(config, num_layers)
        case _:
            _check_same(config, FULL)
            return (None,) * num_layers
    if config.has("layer_types"):
        kinds = read_layer_types(config, num_layers)
    window = config.integer("sliding_window") if SLIDING in kinds else None
    return tuple(window if kind == SLIDING else None for kind in kinds)


def _read_every(config: ConfigFields, num_layers: int) -> Windows:
    """All layers alike: what they see is `sliding_window`, which transformers reads alone."""
    is_silent = "sliding_window" not in config.values
    window = MISTRAL_WINDOW if is_silent else None
    if config.has("sliding_window"):
        window = config.integer("sliding_window")
    _check_same(config, FULL if window is None else SLIDING)
    return (window,) * num_layers


def _check_same(config: ConfigFields, kind: str) -> None:
    """Every entry of `layer_types`, if there are any, is `kind`."""
    kinds = config.values.get("layer_types") or []
    if not isinstance(kinds, list) or any(one != kind for one in kinds):
        raise config.unsupported("layer_types", f"a target's layers must all be {kind}")

"""`layer_types`: which layers of a decoder attend through a sliding window."""

from __future__ import annotations

from dflash_trt.checkpoints.config_fields import ConfigFields

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

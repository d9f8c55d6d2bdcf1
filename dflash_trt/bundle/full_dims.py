"""A target's layers that see everything, where their heads are others than those that slide."""

from __future__ import annotations

from dflash_trt.checkpoints.sizes import DecoderSizes, LayerSizes
from dflash_trt.core.limits import Count
from dflash_trt.core.validation import StrictRecord


class FullDims(StrictRecord):
    """KV heads of layers that see everything, and whether k's projection gives v as well.

    The target's own `kv_heads` and `head_dim` are then of layers that slide. Query heads are as
    many, and all layers norm their values.
    """

    kv_heads: Count
    head_dim: Count
    keys_are_values: bool

    def sizes(self, heads: int) -> LayerSizes:
        """Of one layer with `heads` query heads."""
        return LayerSizes(heads, self.kv_heads, self.head_dim, keys_are_values=self.keys_are_values)


def full_dims(sizes: DecoderSizes) -> FullDims | None:
    """Those of a target; None where all layers are alike."""
    full = sizes.full_layer
    if not full.norms_values:
        return None
    return FullDims(
        kv_heads=full.kv_heads, head_dim=full.head_dim, keys_are_values=full.keys_are_values
    )

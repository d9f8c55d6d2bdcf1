"""A hybrid target's recurrent layers, as a manifest has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

from pydantic import Field

from dflash_trt.checkpoints.sizes import LayerSizes, RecurrentSizes
from dflash_trt.core.limits import Count
from dflash_trt.core.validation import StrictRecord


class RecurrentDims(StrictRecord):
    """Gated DeltaNet layers (see RecurrentSizes), and which ones they are."""

    layers: list[Annotated[int, Field(ge=0)]]
    key_heads: Count
    value_heads: Count
    head_dim: Count
    kernel: Annotated[int, Field(ge=2)]

    def sizes(self, num_layers: int) -> list[RecurrentSizes | None]:
        """Of every layer, None where it has attention."""
        one = RecurrentSizes(self.key_heads, self.value_heads, self.head_dim, self.kernel)
        return [one if layer in self.layers else None for layer in range(num_layers)]


def recurrent_dims(layers: Sequence[LayerSizes]) -> RecurrentDims | None:
    """Those of a target's layers; None where all have attention."""
    found = {i: one.recurrent for i, one in enumerate(layers) if one.recurrent is not None}
    for one in found.values():
        return RecurrentDims(layers=list(found), **asdict(one))
    return None

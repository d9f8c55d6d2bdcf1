"""How a model is split over GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dflash_trt.errors import DflashError
from dflash_trt.models.sizes import LayerSizes, ModelShape

AttentionSplit = Literal["tensor", "data"]


@dataclass(frozen=True, slots=True)
class GpuLayout:
    """How one replica of a model lies on GPUs.

    Args:
        gpus: of one replica.
        attention: "tensor": heads, MLP and vocabulary are split, and every GPU works on every
            sequence. "data": each GPU has all attention weights and its own sequences, and
            experts are dealt out whole (expert parallelism).
    """

    gpus: int = 1
    attention: AttentionSplit = "tensor"

    @property
    def label(self) -> str:
        if self.gpus == 1:
            return "1 GPU"
        return f"{'TP' if self.attention == 'tensor' else 'DP+EP'} {self.gpus}"

    @property
    def attention_ways(self) -> int:
        """GPUs that attention, vocabulary and draft are split over."""
        return self.gpus if self.attention == "tensor" else 1

    def kv_ways(self, layer: LayerSizes) -> int:
        """GPUs that KV heads are split over; GPUs beyond their number hold copies."""
        return min(self.attention_ways, layer.kv_heads)

    def sequences_per_gpu(self, batch: int) -> int:
        """Sequences of the replica's `batch` whose KV cache one GPU reads."""
        return batch if self.attention == "tensor" else -(-batch // self.gpus)

    def check(self, *models: ModelShape) -> None:
        """Raises DflashError where the layout cannot hold a model."""
        ways = self.attention_ways
        for layer in (layer for model in models for layer in model.sizes.kinds):
            if layer.heads % ways or (layer.kv_heads % ways and ways % layer.kv_heads):
                raise DflashError(
                    f"{ways} GPUs do not divide {layer.heads} attention heads and "
                    f"{layer.kv_heads} KV heads",
                    where="--layout",
                    usage=True,
                )
            recurrent = layer.recurrent
            if recurrent is not None and recurrent.key_heads % ways:
                what = f"{ways} GPUs do not divide {recurrent.key_heads} heads of recurrent layers"
                raise DflashError(what, where="--layout", usage=True)
        experts = models[0].experts
        if self.attention == "data" and (experts is None or experts.experts % self.gpus):
            count = "no" if experts is None else f"{experts.experts}"
            raise DflashError(
                f"{self.gpus} GPUs cannot share {count} experts evenly",
                where="--layout",
                usage=True,
            )


ONE_GPU = GpuLayout()

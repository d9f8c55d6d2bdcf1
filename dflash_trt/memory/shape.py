"""The models of a pair as far as bytes and FLOPs go: sizes, and what weights are stored in."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from dflash_trt.checkpoints.sizes import DecoderSizes, ExpertSizes, LayerSizes
from dflash_trt.hardware.gpus import Gpu, MathPrecision

FormatName = Literal["bf16", "fp8", "nvfp4", "mxfp4"]


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """A way to store a linear's weights.

    Args:
        bits: per weight, block scales included: NVFP4 has 8 bits for 16 weights, MXFP4 for 32.
        math: what both operands are multiplied in on tensor cores that have it.
    """

    name: FormatName
    bits: float
    math: MathPrecision

    def bytes(self, weights: int) -> float:
        return weights * self.bits / 8

    def is_native(self, gpu: Gpu) -> bool:
        """Whether tensor cores of `gpu` take it; MXFP4 with FP8 inputs, where they have FP4."""
        if self.name == "bf16":
            return True
        return (gpu.fp8 if self.name == "fp8" else gpu.fp4) is not None

    def math_on(self, gpu: Gpu) -> MathPrecision:
        """What `gpu` multiplies it in: bf16 where it must be unpacked first."""
        return self.math if self.is_native(gpu) else "bf16"

    def flops(self, gpu: Gpu) -> float:
        """Dense FLOP/s that `gpu` promises for it."""
        return gpu.flops(self.math_on(gpu))


FORMATS: dict[FormatName, WeightFormat] = {
    format.name: format
    for format in (
        WeightFormat("bf16", 16, "bf16"),
        WeightFormat("fp8", 8, "fp8"),
        WeightFormat("nvfp4", 4.5, "fp4"),
        WeightFormat("mxfp4", 4.25, "fp8"),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A decoder with its vocabulary.

    Args:
        tied_embeddings: the output head is the embedding.
        max_context: positions that its RoPE covers.
        attention_format, mlp_format: of the linears of each; the rest is bf16.
    """

    sizes: DecoderSizes
    vocab: int
    max_context: int
    tied_embeddings: bool = False
    attention_format: FormatName = "bf16"
    mlp_format: FormatName = "bf16"

    @property
    def experts(self) -> ExpertSizes | None:
        return self.sizes.experts

    @property
    def experts_format(self) -> FormatName | None:
        """What its experts are stored in; None where it is dense."""
        return None if self.experts is None else self.mlp_format

    @property
    def has_windows(self) -> bool:
        """Whether some layers see a sliding window only."""
        return any(layer.window is not None for layer in self.sizes.layers)

    def attention_weights(self, layer: LayerSizes) -> int:
        """Of q, k, v and o of one layer, or of what a recurrent one has in their place."""
        outputs = layer.heads * layer.head_dim
        if layer.recurrent is not None:
            outputs = layer.recurrent.value_elements
        return self.sizes.hidden_size * (layer.projection_elements + outputs)

    @property
    def mlp_weights(self) -> int:
        """Of gate, up and down of one layer: of one expert where there are experts."""
        return 3 * self.sizes.hidden_size * self.sizes.mlp_size

    @property
    def shared_weights(self) -> int:
        """Of the expert of one layer that all rows go through; 0 where there is none."""
        return 0 if self.experts is None else 3 * self.sizes.hidden_size * self.experts.shared

    @property
    def router_weights(self) -> int:
        """Of one layer, the shared expert's gate included."""
        if self.experts is None:
            return 0
        return self.sizes.hidden_size * (self.experts.experts + bool(self.experts.shared))

    @property
    def vocab_weights(self) -> int:
        """Of the embedding, and of the output head."""
        return self.vocab * self.sizes.hidden_size

    @property
    def formats(self) -> tuple[WeightFormat, WeightFormat]:
        """Of attention and MLP."""
        return FORMATS[self.attention_format], FORMATS[self.mlp_format]

    def in_format(self, name: FormatName) -> ModelShape:
        """The same model with attention and MLP stored in `name`."""
        return replace(self, attention_format=name, mlp_format=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftShape:
    """A draft: `model` without embedding and head, which it borrows from the target.

    Args:
        model: its layers; `vocab` is the target's.
        block_size: trained, anchor included.
        taps: target layers whose outputs `fc` takes.
        target_hidden: their width.
        markov_rank: of DSpark's head; 0 where there is none.
    """

    model: ModelShape
    block_size: int
    taps: int
    target_hidden: int
    markov_rank: int = 0

    @property
    def fc_weights(self) -> int:
        return self.taps * self.target_hidden * self.model.sizes.hidden_size

    @property
    def markov_weights(self) -> int:
        """Of both tables of the head."""
        return 2 * self.markov_rank * self.model.vocab


@dataclass(frozen=True, slots=True, kw_only=True)
class DFlashShape(DraftShape):
    """A DFlash draft and what a runtime must know to feed it.

    Args:
        target_layer_ids: the `taps` layers of the target, from 0, in the order of fc's inputs.
        mask_token_id: the token at every position that it drafts.
    """

    target_layer_ids: tuple[int, ...]
    mask_token_id: int

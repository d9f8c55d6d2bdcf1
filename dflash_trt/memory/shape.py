"""The models of a pair as far as bytes and FLOPs go: sizes, and what weights are stored in."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dflash_trt.checkpoints.sizes import DecoderSizes, ExpertSizes, LayerSizes
from dflash_trt.memory.formats import FORMATS, FormatName, WeightFormat


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

    def attention_weights(self, layer: LayerSizes) -> int:
        """Of q, k, v and o of one layer."""
        return 2 * self.sizes.hidden_size * layer.head_dim * (layer.heads + layer.kv_heads)

    @property
    def mlp_weights(self) -> int:
        """Of gate, up and down of one layer: of one expert where there are experts."""
        return 3 * self.sizes.hidden_size * self.sizes.mlp_size

    @property
    def router_weights(self) -> int:
        """Of one layer."""
        return 0 if self.experts is None else self.sizes.hidden_size * self.experts.experts

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
    """A DFlash draft: `model` without embedding and head, which it borrows from the target.

    Args:
        model: its layers; `vocab` is the target's.
        block_size: trained, anchor included.
        taps: target layers whose outputs `fc` takes.
        target_hidden: their width.
    """

    model: ModelShape
    block_size: int
    taps: int
    target_hidden: int

    @property
    def fc_weights(self) -> int:
        return self.taps * self.target_hidden * self.model.sizes.hidden_size

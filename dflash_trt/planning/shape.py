"""The shapes of a target and its drafters: what bytes and FLOPs are computed from."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dflash_trt.planning.formats import FORMATS, FormatName, WeightFormat


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture-of-experts layer: each token goes through `per_token` of `count`."""

    count: int
    per_token: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A decoder's sizes in elements.

    Args:
        intermediate: width of the MLP, of one expert where there are experts.
        layer_windows: per layer, None where it attends to everything, else w: a query at p sees
            keys j with p - j < w.
        tied_embeddings: the output head is the embedding.
        max_context: positions that its RoPE covers.
        attention_format, mlp_format: of the linears of each; the rest is bf16.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    layer_windows: tuple[int | None, ...]
    max_context: int
    experts: Experts | None = None
    tied_embeddings: bool = False
    attention_format: FormatName = "bf16"
    mlp_format: FormatName = "bf16"

    @property
    def attention_weights(self) -> int:
        """Of q, k, v and o of one layer."""
        return 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)

    @property
    def mlp_weights(self) -> int:
        """Of gate, up and down of one layer: of one expert where there are experts."""
        return 3 * self.hidden * self.intermediate

    @property
    def router_weights(self) -> int:
        """Of one layer."""
        return 0 if self.experts is None else self.hidden * self.experts.count

    @property
    def vocab_weights(self) -> int:
        """Of the embedding, and of the output head."""
        return self.vocab * self.hidden

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
        return self.taps * self.target_hidden * self.model.hidden

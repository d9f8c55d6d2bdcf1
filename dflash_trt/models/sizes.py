"""The sizes of a decoder, layer by layer, and the shapes of targets and drafts that have them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Self

from dflash_trt.core.formats import Format
from dflash_trt.models.dflash2 import Dflash2Sizes

MAX_LAYERS = 1024
MAX_WIDTH = 2**24
MAX_HEADS = 2**14

Windows = tuple[int | None, ...]


HYBRIDS = "a hybrid with recurrent layers"
TWO_HEADS = "a Gemma 4 with heads of two kinds"
"""What FP8 caches and deployments are refused for."""


@dataclass(frozen=True, slots=True)
class RecurrentSizes:
    """A Gated DeltaNet layer (arXiv 2412.06464): `key_heads` of q and of k, `value_heads` of v.

    All have `head_dim` elements. A causal convolution over `kernel` rows comes before them.
    """

    key_heads: int
    value_heads: int
    head_dim: int
    kernel: int

    @property
    def value_elements(self) -> int:
        """Elements of v in a row, which are those of the output and of its gate."""
        return self.value_heads * self.head_dim

    @property
    def channels(self) -> int:
        """Elements of q, k and v in a row, which the convolution takes."""
        return 2 * self.key_heads * self.head_dim + self.value_elements

    @property
    def row_elements(self) -> int:
        """What is kept of a row: the channels and both gates, of which a head has one each."""
        return self.channels + 2 * self.value_heads

    @property
    def state_elements(self) -> int:
        """Elements of a sequence's state."""
        return self.value_elements * self.head_dim


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """One layer's attention: query heads and KV heads, of `head_dim` elements each.

    A query at p sees keys j with |p - j| < `window` (None: all), of these none after p where
    `is_causal`. `has_sinks`: every head's softmax has one more term. `has_gate`: q comes with a
    gate of its size for the output. A layer that is `recurrent` has no attention.
    """

    heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None
    is_causal: bool = True
    has_sinks: bool = False
    has_gate: bool = False
    recurrent: RecurrentSizes | None = None
    norms_values: bool = False
    keys_are_values: bool = False

    @property
    def kind(self) -> LayerSizes:
        """Its sizes alone: causal, without a window."""
        return replace(self, window=None, is_causal=True)

    @property
    def kv_elements(self) -> int:
        """Elements of K and V together, for one token."""
        return 0 if self.recurrent is not None else 2 * self.kv_heads * self.head_dim

    @property
    def query_elements(self) -> int:
        """Elements that a token has in q, its gate included."""
        return self.heads * self.head_dim * (1 + self.has_gate)

    @property
    def projection_elements(self) -> int:
        """Elements that a token has in q, k and v together, gates included."""
        if self.recurrent is not None:
            return self.recurrent.row_elements + self.recurrent.value_elements
        return self.query_elements + self.kv_elements // (1 + self.keys_are_values)

    @property
    def output_elements(self) -> int:
        """Elements that a token's output projection takes."""
        if self.recurrent is not None:
            return self.recurrent.value_elements
        return self.heads * self.head_dim


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    """A layer's experts: `experts` MLPs of width `intermediate_size`, `chosen` of them a row.

    `shared` is the width of one more that every row goes through; 0 where there is none.
    """

    experts: int
    chosen: int
    intermediate_size: int
    shared: int = field(default=0, kw_only=True)


@dataclass(frozen=True, kw_only=True)
class DecoderSizes:
    """Sizes in elements; `intermediate_size` is the width of an MLP without experts, or of the
    expert that all rows share.

    `features` is the width of what an EAGLE-3 head keeps of its target for each token.
    """

    hidden_size: int
    intermediate_size: int
    layers: tuple[LayerSizes, ...]
    experts: ExpertSizes | None = None
    features: int = 0

    @cached_property
    def layer(self) -> LayerSizes:
        """The sizes of layers with attention: of those that slide, where the others differ.

        Raises ValueError where that leaves several.
        """
        return self._one_kind(is_sliding=True)

    @cached_property
    def full_layer(self) -> LayerSizes:
        """The sizes of layers that see everything; those of `layer` where none does."""
        return self._one_kind(is_sliding=False)

    def _one_kind(self, *, is_sliding: bool) -> LayerSizes:
        layers = [layer for layer in self.layers if layer.recurrent is None]
        some = [layer for layer in layers if (layer.window is not None) is is_sliding]
        kinds = {layer.kind for layer in some or layers}
        if len(kinds) != 1:
            raise ValueError(f"layers of {len(kinds)} sizes")
        return kinds.pop()

    @property
    def mlp_size(self) -> int:
        """Width of one MLP: of an expert where there are experts."""
        return self.intermediate_size if self.experts is None else self.experts.intermediate_size

    @property
    def has_state(self) -> bool:
        """Whether some layers are recurrent."""
        return any(layer.recurrent is not None for layer in self.layers)

    @property
    def has_full_heads(self) -> bool:
        """Whether layers that see everything have heads of their own, as a Gemma 4's do."""
        return any(layer.norms_values for layer in self.layers)

    @property
    def unusual(self) -> str | None:
        """Why FP8 caches and deployments are refused; None where they are not."""
        if self.has_state:
            return HYBRIDS
        return TWO_HEADS if self.has_full_heads else None

    @property
    def needs_sink_room(self) -> bool:
        """Whether TensorRT's own attention needs a sink: the model has some, or is a chain, the
        rows of whose steps count as one."""
        return bool(self.features) or any(layer.has_sinks for layer in self.layers)

    @property
    def windows(self) -> Windows:
        """Per layer, None where it sees everything."""
        return tuple(layer.window for layer in self.layers)

    @cached_property
    def kinds(self) -> Mapping[LayerSizes, Sequence[LayerSizes]]:
        """The layers by their sizes alone."""
        found: dict[LayerSizes, list[LayerSizes]] = {}
        for layer in self.layers:
            found.setdefault(layer.kind, []).append(layer)
        return found

    @cached_property
    def windows_by_kind(self) -> Mapping[LayerSizes, Mapping[int | None, int]]:
        """How many layers of each kind have each window."""
        return {kind: Counter(one.window for one in layers) for kind, layers in self.kinds.items()}

    def with_layers(
        self,
        windows: Iterable[int | None],
        causal: Iterable[bool] | None = None,
        *,
        has_sinks: bool = False,
    ) -> DecoderSizes:
        """The same with as many layers as there are `windows`, all of the sizes of `layer`."""
        windows, layer = tuple(windows), replace(self.layer, has_sinks=has_sinks)
        sees = [True] * len(windows) if causal is None else causal
        layers = (
            replace(layer, window=window, is_causal=is_causal)
            for window, is_causal in zip(windows, sees, strict=True)
        )
        return replace(self, layers=tuple(layers))

    def with_recurrence(self, layers: Iterable[RecurrentSizes | None]) -> DecoderSizes:
        """The same with these layers: None has the attention of `layer`, with a gate."""
        gated = replace(self.layer, has_gate=True)
        mixed = (replace(gated, recurrent=one, has_gate=one is None) for one in layers)
        return replace(self, layers=tuple(mixed))

    def with_full(self, full: LayerSizes) -> DecoderSizes:
        """The same, layers that see everything of the sizes of `full`; all have norms of values."""
        shapes = (layer if layer.window is not None else full for layer in self.layers)
        return replace(self, layers=tuple(replace(one, norms_values=True) for one in shapes))

    def seen_elements(self, context: float) -> float:
        """Elements that a query of every head meets in all layers, behind `context` tokens."""
        return sum(
            layer.heads
            * layer.head_dim
            * (count * (context if window is None else min(context, window)))
            for layer, windows in self.windows_by_kind.items()
            if layer.recurrent is None
            for window, count in windows.items()
        )

    def symbols(self) -> dict[str, int]:
        """The names that weight shapes are written in."""
        symbols = {
            "hidden": self.hidden_size,
            "heads": self.layer.heads,
            "kv_heads": self.layer.kv_heads,
            "head_dim": self.layer.head_dim,
            "full_kv_heads": self.full_layer.kv_heads,
            "full_head_dim": self.full_layer.head_dim,
            "intermediate": self.intermediate_size,
            "one": 1,
        }
        recurrent = next((one.recurrent for one in self.layers if one.recurrent), None)
        if recurrent is not None:
            symbols |= {
                "queries_gates": self.layer.query_elements,
                "channels": recurrent.channels,
                "values": recurrent.value_elements,
                "value_heads": recurrent.value_heads,
                "value_dim": recurrent.head_dim,
                "kernel": recurrent.kernel,
            }
        return symbols


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """What memory and time of a decoder follow from: sizes, and what weights are stored in.

    Args:
        max_position_embeddings: positions that its RoPE covers.
        attention_format, mlp_format: of the linears of each; the rest is bf16.
    """

    sizes: DecoderSizes
    max_position_embeddings: int
    attention_format: Format = Format.BF16
    mlp_format: Format = Format.BF16

    @property
    def experts(self) -> ExpertSizes | None:
        return self.sizes.experts

    @property
    def experts_format(self) -> Format | None:
        """What its experts are stored in; None where it is dense."""
        return None if self.experts is None else self.mlp_format

    @property
    def has_windows(self) -> bool:
        """Whether some layers see a sliding window only."""
        return any(layer.window is not None for layer in self.sizes.layers)

    def attention_weights(self, layer: LayerSizes) -> int:
        """Of q, k, v and o of one layer, or of what a recurrent one has in their place."""
        return self.sizes.hidden_size * (layer.projection_elements + layer.output_elements)

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

    def in_format(self, form: Format) -> Self:
        """The same model with attention and MLP stored in `form`."""
        return replace(self, attention_format=form, mlp_format=form)


@dataclass(frozen=True, kw_only=True)
class TargetShape(ModelShape):
    """A target; with `tie_word_embeddings` its output head is the embedding."""

    vocab_size: int
    tie_word_embeddings: bool = False

    @property
    def vocab_weights(self) -> int:
        """Of the embedding, and of the output head."""
        return self.vocab_size * self.sizes.hidden_size


@dataclass(frozen=True, kw_only=True)
class DraftShape(ModelShape):
    """A draft, without embedding and head, which it borrows from the target.

    Args:
        block_size: trained, anchor included.
        mask_token_id: the token at every position that it drafts.
        target_layer_ids: the target's layers, from 0, whose outputs `fc` takes, in its order.
        vocab_size: the target's; None where a config is silent.
        markov_rank: of DSpark's head; 0 where there is none.
        dflash2: what a DFlash 2 draft has beyond a DFlash draft.
        fuses_token: `fc` takes a token's embedding too, in every pass: an MTP layer's.
    """

    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    vocab_size: int | None = None
    markov_rank: int = 0
    dflash2: Dflash2Sizes | None = None
    fuses_token: bool = False

    @property
    def fc_weights(self) -> int:
        return (len(self.target_layer_ids) + self.fuses_token) * self.sizes.hidden_size**2

    @property
    def dflash2_weights(self) -> int:
        """Of convolutions and selector."""
        if self.dflash2 is None:
            return 0
        layers = len(self.sizes.layers)
        shapes = self.dflash2.shapes(self.sizes.hidden_size, self.vocab_size or 0, layers)
        return sum(map(math.prod, shapes.values()))

    @property
    def markov_weights(self) -> int:
        """Of both tables of the head."""
        return 2 * self.markov_rank * (self.vocab_size or 0)

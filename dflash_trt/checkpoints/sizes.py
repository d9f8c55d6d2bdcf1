"""The sizes of a decoder, layer by layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from dflash_trt.checkpoints.config_fields import ConfigFields
from dflash_trt.checkpoints.families import Activation

MAX_LAYERS = 1024
MAX_WIDTH = 2**24
MAX_HEADS = 2**14

Windows = tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Unusual:
    """What neither FP8 caches nor all deployments take, in words for one such model and many."""

    one: str
    many: str


HYBRIDS = Unusual("a hybrid with recurrent layers", "hybrids with recurrent layers")
TWO_HEADS = Unusual("a Gemma 4 with heads of two kinds", "Gemma 4 with heads of two kinds")


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


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    """A layer's experts: `experts` MLPs of width `intermediate_size`, `chosen` of them a row.

    `shared` is the width of one more that every row goes through; 0 where there is none.
    """

    experts: int
    chosen: int
    intermediate_size: int
    shared: int = field(default=0, kw_only=True)


@dataclass(frozen=True, slots=True, kw_only=True)
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

    @property
    def layer(self) -> LayerSizes:
        """The sizes of layers with attention: of those that slide, where the others differ.

        Raises ValueError where that leaves several.
        """
        return self._one_kind(is_sliding=True)

    @property
    def full_layer(self) -> LayerSizes:
        """The sizes of layers that see everything; those of `layer` where none does."""
        return self._one_kind(is_sliding=False)

    def _one_kind(self, *, is_sliding: bool) -> LayerSizes:
        layers = [layer for layer in self.layers if layer.recurrent is None]
        some = [layer for layer in layers if (layer.window is not None) is is_sliding]
        kinds = list(_kinds(tuple(some or layers)))
        if len(kinds) != 1:
            raise ValueError(f"layers of {len(kinds)} sizes")
        return kinds[0]

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
    def unusual(self) -> Unusual | None:
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

    def kinds(self) -> Mapping[LayerSizes, Sequence[LayerSizes]]:
        """The layers by their sizes alone: keys are causal and have no window."""
        return _grouped(self.layers).kinds

    def windows_by_kind(self) -> Mapping[LayerSizes, Mapping[int | None, int]]:
        """How many layers of each kind have each window."""
        return _grouped(self.layers).windows

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
            for layer, windows in self.windows_by_kind().items()
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
        for layer in self.layers:
            if layer.recurrent is not None:
                return symbols | {
                    "queries_gates": self.layer.query_elements,
                    "channels": layer.recurrent.channels,
                    "values": layer.recurrent.value_elements,
                    "value_heads": layer.recurrent.value_heads,
                    "value_dim": layer.recurrent.head_dim,
                    "kernel": layer.recurrent.kernel,
                }
        return symbols


@dataclass(frozen=True, slots=True)
class _Grouped:
    """Layers by their sizes alone. `layers` is kept so that its id stays its own."""

    layers: tuple[LayerSizes, ...]
    kinds: Mapping[LayerSizes, Sequence[LayerSizes]]
    windows: Mapping[LayerSizes, Mapping[int | None, int]]


_KNOWN: dict[int, _Grouped] = {}
_MOST_KNOWN = 64


def _grouped(layers: tuple[LayerSizes, ...]) -> _Grouped:
    """Found again by identity: planners ask for every pass, and to hash all layers takes longer
    than the rest of it."""
    known = _KNOWN.get(id(layers))
    if known is None or known.layers is not layers:
        kinds = _kinds(layers)
        windows = {kind: Counter(one.window for one in some) for kind, some in kinds.items()}
        known = _Grouped(layers, kinds, windows)
        if len(_KNOWN) >= _MOST_KNOWN:
            _KNOWN.clear()
        _KNOWN[id(layers)] = known
    return known


@lru_cache(maxsize=64)
def _kinds(layers: tuple[LayerSizes, ...]) -> Mapping[LayerSizes, Sequence[LayerSizes]]:
    found: dict[LayerSizes, list[LayerSizes]] = {}
    for layer in layers:
        found.setdefault(replace(layer, window=None, is_causal=True), []).append(layer)
    return found


def read_sizes(
    config: ConfigFields,
    default_head_dim: int | None,
    activation: Activation = "silu",
    mlp_key: str = "intermediate_size",
) -> DecoderSizes:
    """Sizes, each checked and against each other; experts and windows are not read.

    `default_head_dim` is the family's for a config that states none; None means
    hidden_size / num_attention_heads. `mlp_key` has the width of the MLP.
    """
    hidden = config.integer("hidden_size", high=MAX_WIDTH)
    heads = config.integer("num_attention_heads", high=MAX_HEADS)
    kv_heads = config.integer("num_key_value_heads", heads, high=MAX_HEADS)
    if heads % kv_heads:
        rule = f"must be a multiple of num_key_value_heads ({kv_heads})"
        raise config.error("num_attention_heads", rule)
    if not config.has("head_dim") and default_head_dim is None and hidden % heads:
        rule = f"must be a multiple of num_attention_heads ({heads}) where head_dim is not given"
        raise config.error("hidden_size", rule)
    head_dim = config.integer("head_dim", default_head_dim or hidden // heads, high=MAX_WIDTH)
    if head_dim % 2:
        raise config.error("head_dim", f"must be even for RoPE, not {head_dim}")
    key, name = ("hidden_act", "silu")
    if activation == "gelu_tanh":
        key, name = ("hidden_activation", "gelu_pytorch_tanh")
    if config.text(key, name) != name:
        raise config.unsupported(key, f"only {name} is")
    layers = config.integer("num_hidden_layers", high=MAX_LAYERS)
    return DecoderSizes(
        hidden_size=hidden,
        intermediate_size=config.integer(mlp_key, high=MAX_WIDTH),
        layers=(LayerSizes(heads, kv_heads, head_dim),) * layers,
    )

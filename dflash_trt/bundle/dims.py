"""The models of a pair as a manifest has them: made of checkpoints, and read back as sizes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Annotated, Any

from pydantic import AfterValidator, Field, model_validator

from dflash_trt.core.limits import Count
from dflash_trt.core.validation import StrictRecord
from dflash_trt.errors import printable
from dflash_trt.graph.bindings import Owner
from dflash_trt.models.decoder import DecoderSpec
from dflash_trt.models.draft_kinds import TRAITS, DraftKind, DraftTraits
from dflash_trt.models.moe import MoeSpec
from dflash_trt.models.pair_check import Pair
from dflash_trt.models.quantization import LinearFormat
from dflash_trt.models.quantized_weights import (
    count_parameters,
    is_kv_scale,
    is_scale,
    quantized_linears,
)
from dflash_trt.models.sizes import (
    MAX_LAYERS,
    DecoderSizes,
    ExpertSizes,
    LayerSizes,
    RecurrentSizes,
)
from dflash_trt.quantization.int8 import Int8Selection, int8_bytes
from dflash_trt.quantization.linears import EMBEDDING


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("has characters that cannot be printed")
    return text


Text = Annotated[str, AfterValidator(_printable)]
"""What may be shown: a terminal obeys other characters."""
Positive = Annotated[int, Field(ge=1)]


class QuantizationSummary(StrictRecord):
    """How a checkpoint is quantised: linears by algorithm, and the patterns that it excludes.

    `kv_cache` is the algorithm that it states for the KV cache, `kv_scales` counts its scales;
    FP8 caches (`kv_dtype`) use those of FP8.
    """

    linears: dict[LinearFormat, Positive]
    excluded: list[Text]
    kv_cache: Text | None
    kv_scales: Annotated[int, Field(ge=0)]


class Int8Dims(StrictRecord):
    """The eight-bit copies of a model's matrices: `parameters` in `weight_bytes`.

    An embedding that is the head too is not among the parameters: it stays beside its copy. `kept`
    are roles of other products, which are computed in floats.
    """

    matrices: Positive
    parameters: Positive
    weight_bytes: Positive
    kept: list[Text]


class ModelDims(StrictRecord):
    """Dimensions of a decoder, in elements.

    `parameters` counts weights once and `storage_dtypes` are theirs; neither counts the scales
    of quantised weights, `weight_bytes` does.
    """

    layers: Annotated[int, Field(ge=1, le=MAX_LAYERS)]
    hidden_size: Positive
    heads: Positive
    kv_heads: Positive
    head_dim: Positive
    intermediate_size: Positive
    parameters: Positive
    weight_bytes: Positive
    storage_dtypes: list[Text]
    checkpoint: Text
    quantization: QuantizationSummary | None = None
    int8: Int8Dims | None = Field(default=None, exclude_if=lambda one: one is None)

    @property
    def sizes(self) -> DecoderSizes:
        layer = LayerSizes(self.heads, self.kv_heads, self.head_dim)
        return DecoderSizes(
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            layers=(layer,) * self.layers,
        )


class ExpertDims(StrictRecord):
    """A mixture of experts: how many a layer has and a row chooses, how wide, how stored.

    `parameters` and `weight_bytes` are those of all layers' experts, without the one of width
    `shared` that every row goes through.
    """

    experts: Positive
    chosen: Positive
    intermediate_size: Positive
    shared: int = Field(default=0, ge=0, exclude_if=lambda width: width == 0)
    storage_dtype: Text
    parameters: Positive
    weight_bytes: Positive

    @property
    def sizes(self) -> ExpertSizes:
        return ExpertSizes(self.experts, self.chosen, self.intermediate_size, shared=self.shared)


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


class TargetDims(ModelDims):
    """`layer_windows` is empty where every layer sees everything before it.

    With `recurrent` layers, the others have an output gate; `full` is of layers without a window.
    """

    family: Text
    layer_windows: list[int | None] = Field(default_factory=list)
    has_sinks: bool = False
    experts: ExpertDims | None = None
    recurrent: RecurrentDims | None = Field(default=None, exclude_if=lambda one: one is None)
    full: FullDims | None = Field(default=None, exclude_if=lambda one: one is None)
    vocab_size: Positive
    max_position_embeddings: Positive
    eos_token_ids: list[int]

    @property
    def sizes(self) -> DecoderSizes:
        windows = self.layer_windows or [None] * self.layers
        sizes = super().sizes.with_layers(windows, has_sinks=self.has_sinks)
        if self.recurrent is not None:
            sizes = sizes.with_recurrence(self.recurrent.sizes(self.layers))
        if self.full is not None:
            sizes = sizes.with_full(self.full.sizes(self.heads))
        return replace(sizes, experts=None if self.experts is None else self.experts.sizes)


class Dflash2Dims(StrictRecord):
    """What a DFlash 2 draft has beside DFlash's layers (see Dflash2Sizes)."""

    group: Count
    rank: Count
    top_k: Count


class DraftDims(ModelDims):
    """`token_count` is how many tokens the draft chooses among; None is all of them.

    `anchor_drafts`: the anchor's slot drafts too, as in DeepSpec's layout. `owned` are its own
    embedding and head, by role, where it does not take the target's.
    `max_position_embeddings` is there where it is less than the target's: behind so many positions
    nothing is drafted.
    """

    kind: DraftKind = "DFlash"
    anchor_drafts: bool = False
    trained_block_size: Positive
    mask_token_id: Annotated[int, Field(ge=0)]
    target_layer_ids: list[int]
    layer_windows: list[int | None]
    layer_causal: list[bool]
    token_count: Positive | None = None
    owned: list[Text] = Field(default_factory=list, exclude_if=lambda one: not one)
    max_position_embeddings: Positive | None = Field(
        default=None, exclude_if=lambda one: one is None
    )
    experts: ExpertDims | None = Field(default=None, exclude_if=lambda one: one is None)
    dflash2: Dflash2Dims | None = Field(default=None, exclude_if=lambda one: one is None)

    @model_validator(mode="before")
    @classmethod
    def _refuse_coupling(cls, given: Any) -> Any:
        """Older builds could couple drafts to the noise of sampled draws."""
        if isinstance(given, dict) and "sharpness" in given:
            raise ValueError("drafts that share the noise of sampled draws are not made any more")
        return given

    @property
    def traits(self) -> DraftTraits:
        return TRAITS[self.kind]

    @property
    def sizes(self) -> DecoderSizes:
        sizes = super().sizes.with_layers(self.layer_windows, self.layer_causal)
        features = self.hidden_size if self.traits.is_chain else 0
        experts = None if self.experts is None else self.experts.sizes
        return replace(sizes, features=features, experts=experts)


def int8_models(target: TargetDims, draft: DraftDims) -> frozenset[Owner]:
    """Those that compute in int8."""
    models: dict[Owner, ModelDims] = {"target": target, "draft": draft}
    return frozenset(owner for owner, dims in models.items() if dims.int8 is not None)


def target_dims(
    pair: Pair, end_ids: Sequence[int], int8: Int8Selection | None = None
) -> TargetDims:
    """The target's part of a manifest; `end_ids` are all that end a text."""
    target = pair.target
    return TargetDims(
        **_decoder_dims(target, int8),
        family=target.family,
        layer_windows=list(target.layer_windows) if any(target.layer_windows) else [],
        has_sinks=target.has_sinks,
        experts=_expert_dims(target),
        recurrent=_recurrent_dims(target.sizes.layers),
        full=_full_dims(target.sizes),
        vocab_size=target.vocab_size,
        max_position_embeddings=target.max_position_embeddings,
        eos_token_ids=list(end_ids),
    )


def _expert_dims(spec: DecoderSpec) -> ExpertDims | None:
    moe = spec.sizes.experts
    if not isinstance(moe, MoeSpec):
        return None
    stored = {role: entry for role, entry in spec.weights.items() if ".experts." in role}
    dtypes = sorted({entry.dtype for entry in stored.values()})
    return ExpertDims(
        experts=moe.experts,
        chosen=moe.chosen,
        intermediate_size=moe.intermediate_size,
        shared=moe.shared,
        storage_dtype=moe.storage if moe.storage != "float" else "/".join(dtypes),
        parameters=count_parameters(stored),
        weight_bytes=sum(entry.length for entry in stored.values()),
    )


def draft_dims(pair: Pair, int8: Int8Selection | None = None) -> DraftDims:
    """The draft's part of a manifest."""
    draft, ids = pair.draft, pair.draft_token_ids
    positions = draft.max_position_embeddings
    return DraftDims(
        **_decoder_dims(draft, int8),
        kind=draft.kind,
        anchor_drafts=draft.anchor_drafts,
        trained_block_size=draft.block_size,
        mask_token_id=draft.mask_token_id,
        target_layer_ids=list(draft.target_layer_ids),
        layer_windows=list(draft.layer_windows),
        layer_causal=list(draft.layer_causal),
        token_count=None if ids is None else len(ids),
        owned=list(draft.owned),
        max_position_embeddings=(
            positions if positions < pair.target.max_position_embeddings else None
        ),
        experts=_expert_dims(draft),
        dflash2=None if draft.dflash2 is None else Dflash2Dims(**asdict(draft.dflash2)),
    )


def _decoder_dims(spec: DecoderSpec, int8: Int8Selection | None) -> dict[str, Any]:
    """The fields of ModelDims."""
    sizes = spec.sizes
    return {
        "layers": len(sizes.layers),
        "hidden_size": sizes.hidden_size,
        "heads": sizes.layer.heads,
        "kv_heads": sizes.layer.kv_heads,
        "head_dim": sizes.layer.head_dim,
        "intermediate_size": sizes.intermediate_size,
        "parameters": count_parameters(spec.weights),
        "weight_bytes": sum(entry.length for entry in spec.weights.values()),
        "storage_dtypes": sorted(
            {entry.dtype for role, entry in spec.weights.items() if not is_scale(role)}
        ),
        "checkpoint": printable(spec.checkpoint.path.name),
        "quantization": _quantization(spec),
        "int8": None if int8 is None else int8_dims(int8),
    }


def int8_dims(selection: Int8Selection) -> Int8Dims:
    """What a manifest says of the copies of `selection`."""
    matrices = selection.matrices.values()
    return Int8Dims(
        matrices=len(matrices),
        parameters=sum(
            one.num_elements for role, one in selection.matrices.items() if role != EMBEDDING
        ),
        weight_bytes=int8_bytes(matrices),
        kept=[printable(role) for role in selection.kept],
    )


def _quantization(spec: DecoderSpec) -> QuantizationSummary | None:
    stated = spec.quantization
    if stated is None:
        return None
    return QuantizationSummary(
        linears=dict(Counter(quantized_linears(spec.weights).values())),
        excluded=[printable(one) for one in stated.excluded],
        kv_cache=stated.kv_cache_algorithm,
        kv_scales=sum(map(is_kv_scale, spec.checkpoint.tensors)),
    )


def _recurrent_dims(layers: Sequence[LayerSizes]) -> RecurrentDims | None:
    found = {i: one.recurrent for i, one in enumerate(layers) if one.recurrent is not None}
    for one in found.values():
        return RecurrentDims(layers=list(found), **asdict(one))
    return None


def _full_dims(sizes: DecoderSizes) -> FullDims | None:
    full = sizes.full_layer
    if not full.norms_values:
        return None
    return FullDims(
        kv_heads=full.kv_heads, head_dim=full.head_dim, keys_are_values=full.keys_are_values
    )

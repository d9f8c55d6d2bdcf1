"""The bundle's manifest: what it contains, in numbers that the rest of the project trusts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from dflash_trt.backends.tensorrt.library import OperationForm
from dflash_trt.bundle.full_dims import FullDims
from dflash_trt.bundle.recurrent_dims import RecurrentDims
from dflash_trt.checkpoints.draft_kinds import TRAITS, DraftKind, DraftTraits
from dflash_trt.checkpoints.quantization import LinearFormat
from dflash_trt.checkpoints.sizes import (
    MAX_LAYERS,
    DecoderSizes,
    ExpertSizes,
    LayerSizes,
)
from dflash_trt.core.files import FileKind, exists
from dflash_trt.core.limits import Limits, PagePool
from dflash_trt.core.validation import StrictRecord, read_record
from dflash_trt.errors import DflashError
from dflash_trt.graph.bindings import GraphName
from dflash_trt.graph.form import CacheDtype, GraphForm, Precision

MANIFEST_NAME = "manifest.json"
TOKENIZER_FOLDER = "tokenizer"
PROMPTS_NAME = "prompts.jsonl"
SCHEMA_VERSION: Literal[1] = 1


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("has characters that cannot be printed")
    return text


Text = Annotated[str, AfterValidator(_printable)]
"""What may be shown: a terminal obeys other characters."""
Positive = Annotated[int, Field(ge=1)]
Origin = Literal["linked", "copied", "quantized"]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class QuantizationSummary(StrictRecord):
    """How a checkpoint is quantised: linears by algorithm, and the patterns that it excludes.

    `kv_cache` is the algorithm that it states for the KV cache, `kv_scales` counts its scales;
    FP8 caches (`kv_dtype`) use those of FP8.
    """

    linears: dict[LinearFormat, Positive]
    excluded: list[Text]
    kv_cache: Text | None
    kv_scales: Annotated[int, Field(ge=0)]


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


class DraftDims(ModelDims):
    """`token_count` is how many tokens the draft chooses among; None is all of them.

    `anchor_drafts`: the anchor's slot drafts too, as in DeepSpec's layout.
    """

    kind: DraftKind = "DFlash"
    anchor_drafts: bool = False
    trained_block_size: Positive
    mask_token_id: Annotated[int, Field(ge=0)]
    target_layer_ids: list[int]
    layer_windows: list[int | None]
    layer_causal: list[bool]
    token_count: Positive | None = None

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
        return replace(sizes, features=self.hidden_size if self.traits.is_chain else 0)


class BundleFile(StrictRecord):
    """One file: always its size; weights their header's hash and, if asked for, the whole's."""

    path: Text
    bytes: Annotated[int, Field(ge=0)]
    sha256: Sha256 | None = None
    header_sha256: Sha256 | None = None

    @field_validator("path")
    @classmethod
    def _stay_inside(cls, path: str) -> str:
        parts = PurePosixPath(path)
        if parts.is_absolute() or ".." in parts.parts or not parts.parts:
            raise ValueError("path leaves the bundle")
        return path


class EngineFile(StrictRecord):
    """One graph's engine; sizes and hashes are with the bundle's other files.

    `layers` counts the network as parsed; `summary` is the path of the whole list.
    `fused_attentions` and `cache_updates` are TensorRT's own: a plugin's are not among them.
    `quantized_products` counts the linears that compute in 8 or 4 bits, by algorithm.
    `operations` says of each function how it runs: TensorRT's own layer, a plugin, or its body.
    `plugin_caches` names the caches that plugins write, of which TensorRT says nothing at load.
    """

    graph: GraphName
    path: Text
    summary: Text
    layers: Positive
    fused_attentions: Annotated[int, Field(ge=0)]
    cache_updates: Annotated[int, Field(ge=0)]
    quantized_products: dict[LinearFormat, Positive] = Field(default_factory=dict)
    operations: dict[Text, OperationForm] = Field(default_factory=dict)
    plugin_caches: list[Text] = Field(default_factory=list)


class EngineSet(StrictRecord):
    """Engines built ahead of time: they run on `arch`, with the library that built them.

    With `draws` the target's draw tokens and settle steps themselves, sampled ones too.
    `plugin_interface` is that of their plugins (kernels/interface.py), None where they have none.
    """

    arch: Text
    library_version: Text
    cache_length: Positive
    draws: bool = False
    plugin_interface: Positive | None = Field(default=None, exclude_if=lambda one: one is None)
    files: list[EngineFile]

    @property
    def has_plugins(self) -> bool:
        """Whether a plugin runs any function of theirs."""
        return any("plugin" in file.operations.values() for file in self.files)


class Manifest(StrictRecord):
    """`manifest.json`.

    `weights` says how the weight files came here: "quantized" where the build quantised a model,
    whatever became of the other's. `engines` is None for the CPU, which runs the graphs themselves;
    `page_pool` is None where KV caches are linear. They hold, by `kv_dtype`, the compute type
    ("auto") or what E4M3 can ("fp8", graph/kv_cache_update.py).
    """

    schema_version: Literal[1]
    name: Text
    created_by: Text
    executor: Literal["cpu", "tensorrt-rtx", "tensorrt"]
    compute_dtype: Literal["float32", "float16", "bfloat16"]
    target: TargetDims
    draft: DraftDims
    limits: Limits
    weights: Origin
    tokenizer: bool
    libraries: dict[Text, Text]
    files: list[BundleFile]
    engines: EngineSet | None = None
    page_pool: PagePool | None = None
    kv_dtype: Literal["auto", "fp8"] = "auto"

    def encode(self) -> bytes:
        """The content of `manifest.json`."""
        return (self.model_dump_json(indent=2) + "\n").encode()

    @property
    def graph_form(self) -> GraphForm:
        """The form of the bundle's graphs."""
        pool, engines = self.page_pool, self.engines
        form = GraphForm(
            Precision(self.compute_dtype),
            cache_length=None if engines is None else engines.cache_length,
            page_size=None if pool is None else pool.page_size,
            windows=() if pool is None else pool.windows,
            cache_dtype=CacheDtype(self.kv_dtype),
            draws=engines is not None and engines.draws,
            replay=None if self.target.recurrent is None else self.limits.block_size,
        )
        return form if engines is None else form.with_pages(pool)

    @model_validator(mode="after")
    def _fit_together(self) -> Manifest:
        if self.limits.block_size > self.draft.trained_block_size:
            raise ValueError("limits.block_size exceeds draft.trained_block_size")
        if self.draft.mask_token_id >= self.target.vocab_size:
            raise ValueError("draft.mask_token_id is outside the vocabulary")
        if (self.engines is None) != (self.executor == "cpu"):
            raise ValueError(f"engines do not go with executor {self.executor}")
        if (self.compute_dtype == "float32") != (self.executor == "cpu"):
            raise ValueError(f"{self.compute_dtype} does not go with executor {self.executor}")
        if self.engines is not None and self.engines.draws and self.executor != "tensorrt":
            raise ValueError(f"engines that draw do not go with executor {self.executor}")
        for owner, windows in (
            ("target", self.target.layer_windows or [None] * self.target.layers),
            ("draft", self.draft.layer_windows),
            ("draft", self.draft.layer_causal),
        ):
            if len(windows) != getattr(self, owner).layers:
                raise ValueError(f"{owner} has {len(windows)} kinds of layers, not one for each")
        pool = self.page_pool
        if self.executor == "tensorrt-rtx" and (pool is not None or self.kv_dtype != "auto"):
            raise ValueError(f"paged or FP8 caches do not go with executor {self.executor}")
        if pool is not None and pool.positions < self.limits.max_seq_len:
            raise ValueError("page_pool does not hold one sequence of limits.max_seq_len")
        if pool is not None and pool.windowed:
            self._check_windows(pool)
        if self.engines is not None and self.engines.cache_length < self.limits.max_seq_len:
            raise ValueError("engines.cache_length does not hold limits.max_seq_len")
        known = {file.path for file in self.files}
        if len(known) < len(self.files):
            raise ValueError("files: a path is given twice")
        for engine in self.engines.files if self.engines else ():
            if engine.path not in known or engine.summary not in known:
                raise ValueError(f"the {engine.graph} engine is not among the files")
        return self

    def _check_windows(self, pool: PagePool) -> None:
        """Raises ValueError unless windowed pages are those of layers, and enough for one."""
        known = {*self.target.sizes.windows, *self.draft.sizes.windows}
        if list(pool.windows) != sorted({one for one in pool.windows if one in known}):
            raise ValueError("page_pool.windowed has a window that no layer has, or one twice")
        for kind in pool.windowed:
            if kind.pages < self.limits.window_pages(kind.window, pool.page_size):
                raise ValueError(f"the pages of window {kind.window} do not hold one sequence")


def read_manifest(folder: Path) -> Manifest:
    """Reads and validates a bundle's manifest.

    Raises:
        DflashError: no bundle there, another schema version, or fields that do not fit.
    """
    path = folder / MANIFEST_NAME
    if not exists(path):
        raise DflashError(
            f"is not a bundle (no {MANIFEST_NAME})",
            where=folder,
            fix="`dflash-trt build` makes one",
            usage=True,
        )
    return read_record(
        path, Manifest, SCHEMA_VERSION, "build the bundle again", file_kind=FileKind.MANIFEST
    )

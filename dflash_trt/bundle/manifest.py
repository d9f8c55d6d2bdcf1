"""The bundle's manifest: what it contains, in numbers that the rest of the project trusts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from dflash_trt.backends.tensorrt.library import TORCH, OperationForm
from dflash_trt.bundle.dims import DraftDims, Positive, TargetDims, Text
from dflash_trt.bundle.memory.cache_bytes import engine_cache_length
from dflash_trt.core.files import FileKind, exists
from dflash_trt.core.limits import Limits, PagePool
from dflash_trt.core.validation import StrictRecord, read_record
from dflash_trt.errors import DflashError
from dflash_trt.graph.bindings import GraphName
from dflash_trt.graph.form import CacheDtype, GraphForm, Precision
from dflash_trt.models.quantization import LinearFormat

MANIFEST_NAME = "manifest.json"
TOKENIZER_FOLDER = "tokenizer"
PROMPTS_NAME = "prompts.jsonl"
SCHEMA_VERSION: Literal[1] = 1


ExecutorName = Literal["cpu", "tensorrt-rtx", "tensorrt", "torch"]
Origin = Literal["linked", "copied", "quantized"]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


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
    `plugin_interface` is that of their plugins (hardware/kernels.py), None where they have none.
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
    whatever became of the other's. `engines` is None for the CPU and for PyTorch, which run the
    graphs themselves; `page_pool` is None where KV caches are linear. They hold, by `kv_dtype`, the
    compute type ("auto") or what E4M3 can ("fp8", graph/kv_cache_update.py).
    """

    schema_version: Literal[1]
    name: Text
    created_by: Text
    executor: ExecutorName
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
    def longest(self) -> int:
        """Positions that the target was trained for."""
        return self.target.max_position_embeddings

    @property
    def drafts_end(self) -> int:
        """The position that no block of the draft's reaches: where its own or the context end."""
        context = self.limits.max_seq_len
        return min(context, self.draft.max_position_embeddings or context)

    @property
    def is_on_cpu(self) -> bool:
        """Whether the CPU's executor runs it, whose caches grow as tokens come."""
        return self.executor == "cpu"

    @property
    def draws(self) -> bool:
        """Whether the target's graphs draw tokens and settle steps themselves."""
        return self.executor == TORCH or (self.engines is not None and self.engines.draws)

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
            draws=self.draws,
            replay=None if self.target.recurrent is None else self.limits.block_size,
        )
        if self.executor == TORCH:
            length = engine_cache_length(self.limits, self.target.sizes, form)
            form = replace(form, cache_length=length)
        return form if self.is_on_cpu else form.with_pages(pool)

    @model_validator(mode="after")
    def _fit_together(self) -> Manifest:
        if self.limits.block_size > self.draft.trained_block_size:
            raise ValueError("limits.block_size exceeds draft.trained_block_size")
        if self.draft.mask_token_id >= self.target.vocab_size:
            raise ValueError("draft.mask_token_id is outside the vocabulary")
        if (self.engines is None) != (self.executor in ("cpu", TORCH)):
            raise ValueError(f"engines do not go with executor {self.executor}")
        if self.executor != TORCH and (self.compute_dtype == "float32") != self.is_on_cpu:
            raise ValueError(f"{self.compute_dtype} does not go with executor {self.executor}")
        if not self.is_on_cpu and (self.target.int8 or self.draft.int8):
            raise ValueError(f"products in int8 do not go with executor {self.executor}")
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

"""What one may ask of a build: one record for the command line, Python and YAML.

Its sections are the groups of options; every default that is not a configuration's stands here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

from pydantic import Field

from dflash_trt.bundle.support import CPU, TRTLLM, Feature, check_executor
from dflash_trt.core.limits import MAX_COUNT, PAGE_SIZE, Count
from dflash_trt.core.validation import check_value
from dflash_trt.deploy.trtllm.schema import AttentionBackend
from dflash_trt.errors import DflashError, refuse_options
from dflash_trt.graph.form import CacheDtype
from dflash_trt.models.build_config import BuildConfig, PrecisionName
from dflash_trt.models.sizes import MAX_LAYERS


class _Options:
    """Options of the types that their fields say. A text will do for a path, a list for a tuple."""

    __slots__ = ()

    def __post_init__(self) -> None:
        own: type = type(self)
        for name, kind in _types(own).items():
            value = getattr(self, name)
            if isinstance(value, str | os.PathLike) and Path in get_args(kind):
                if not os.fspath(value).strip():  # which Path takes for the folder one is in
                    raise DflashError("is empty", where=name, usage=True)
                object.__setattr__(self, name, Path(value))
            elif isinstance(value, list):
                object.__setattr__(self, name, tuple(value))
            check_value(name, getattr(self, name), kind)


@cache
def _types(options: type) -> Mapping[str, Any]:
    return get_type_hints(options, include_extras=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoints(_Options):
    """Folders to use instead of what the configuration names.

    `target_layer_ids` are the layers, from 0, whose outputs a draft takes that names none.
    """

    target_checkpoint: Path | None = None
    draft_checkpoint: Path | None = None
    target_layer_ids: tuple[Annotated[int, Field(ge=0, lt=MAX_LAYERS)], ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitOptions(_Options):
    """Limits that replace the configuration's; see `BuildConfig`."""

    max_batch: Count | None = None
    max_seq_len: Annotated[int, Field(ge=3, le=MAX_COUNT)] | None = None
    block_size: Annotated[int, Field(ge=2, le=MAX_COUNT)] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionOptions(_Options):
    """What is quantised, and with which texts; None leaves it to the configuration.

    `exclude` has patterns of modules that are not; `calibration` is a .jsonl of prompts.
    """

    precision: PrecisionName | None = None
    draft_precision: PrecisionName | None = None
    calibration: Path | None = None
    exclude: tuple[str, ...] = ()
    quantize_lm_head: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheOptions(_Options):
    """The KV caches: layout, what they hold, tokens of a page and pages of the pool.

    `kv_pages` None is enough for every full sequence.
    """

    kv_layout: Literal["linear", "paged"] = "linear"
    kv_dtype: Literal["auto", "fp8"] = "auto"
    page_size: int | None = None
    kv_pages: Count | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest(_Options):
    """What only engines have: the GPU they are for, this project's kernels."""

    arch: str | None = None
    plugins: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentRequest(_Options):
    """What only a TensorRT-LLM deployment has; None is its default."""

    trtllm_version: str | None = None
    block_schedule: Path | None = None
    attention_backend: AttentionBackend | None = None
    llm_arg: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildSpec(_Options):
    """A build of `target`: a name, a YAML file or a folder; None where `checkpoints` has both.

    `executor` is one of `bundle.support.EXECUTORS`; `profile` names hardware of the configuration.
    `output` None is ./NAME-bundle, or ./NAME-PROFILE for a deployment.
    """

    target: str | None = None
    executor: str = CPU
    profile: str | None = None
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    limits: LimitOptions = field(default_factory=LimitOptions)
    precision: PrecisionOptions = field(default_factory=PrecisionOptions)
    caches: CacheOptions = field(default_factory=CacheOptions)
    engines: EngineRequest = field(default_factory=EngineRequest)
    deployment: DeploymentRequest = field(default_factory=DeploymentRequest)
    copy_weights: bool = False
    hash_weights: bool = False
    overwrite: bool = False
    output: Path | None = None

    @property
    def is_deployment(self) -> bool:
        return self.executor == TRTLLM

    @property
    def page_size(self) -> int | None:
        """Tokens of a page; None for linear caches."""
        caches = self.caches
        return None if caches.kv_layout == "linear" else caches.page_size or PAGE_SIZE

    @property
    def cache_dtype(self) -> CacheDtype:
        return CacheDtype(self.caches.kv_dtype)

    def apply(self, config: BuildConfig) -> BuildConfig:
        """`config` with these limits and precisions in place of its own.

        A precision that is given replaces the configuration's recipe as a whole: its
        draft_precision and patterns were chosen for its own.
        """
        limits, own = asdict(self.limits), self.precision
        update = {name: value for name, value in limits.items() if value is not None}
        if own.precision is not None:
            update |= {"precision": own.precision, "draft_precision": None, "exclude": ()}
        if own.draft_precision is not None:
            update["draft_precision"] = own.draft_precision
        if own.exclude:
            update["exclude"] = own.exclude
        return config.model_copy(update=update)

    def check_executor(self) -> None:
        """Refuses each option that the executor does not support, as the support table words it."""
        caches, plugins = self.caches, self.engines.plugins
        if caches.kv_layout == "linear":
            given = {"--page-size": caches.page_size, "--kv-pages": caches.kv_pages}
            refuse_options(given, "linear caches have no pages", "add --kv-layout paged")
        for feature, value in (
            (Feature.PAGED_CACHES, caches.kv_layout == "paged"),
            (Feature.FP8_CACHES, self.cache_dtype is CacheDtype.FP8),
            (Feature.ARCH, self.engines.arch),
            (Feature.KERNELS, plugins),
            (Feature.HASHES, self.hash_weights),
            (Feature.PROFILE, self.profile),
        ):
            check_executor(feature, self.executor, value, plugins=plugins)
        taps = self.checkpoints.target_layer_ids
        if self.is_deployment:
            what = "TensorRT-LLM reads the draft's own config"
            refuse_options({"--target-layer-ids": taps}, what, "add them there, and leave it out")
        for name, value in asdict(self.deployment).items():
            option = f"--{name.replace('_', '-')}"
            check_executor(Feature.DEPLOYMENT, self.executor, value, where=option)

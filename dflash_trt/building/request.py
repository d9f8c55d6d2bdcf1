"""What one may ask of a build. Every default that is not a configuration's stands here."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

from dflash_trt.config import BuildConfig, PrecisionName
from dflash_trt.core.limits import MAX_COUNT
from dflash_trt.errors import DflashError
from dflash_trt.graph.form import CacheDtype
from dflash_trt.trtllm.schema import AttentionBackend

CPU = "cpu"
TRTLLM = "trtllm"
LINEAR, PAGED = "linear", "paged"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoints:
    """Folders to use instead of what the configuration names."""

    target_checkpoint: Path | None = None
    draft_checkpoint: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitOptions:
    """Limits that replace the configuration's; see `BuildConfig`."""

    max_batch: int | None = None
    max_seq_len: int | None = None
    block_size: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("max_batch", 1), ("max_seq_len", 3), ("block_size", 2)):
            value = getattr(self, name)
            if value is not None and not (type(value) is int and least <= value <= MAX_COUNT):
                raise _refuse(name, value, f"a whole number from {least} to {MAX_COUNT}")

    def apply(self, config: BuildConfig) -> BuildConfig:
        """`config` with these limits in place of its own."""
        given = {name: getattr(self, name) for name in self.__slots__}
        return config.model_copy(update={name: value for name, value in given.items() if value})


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionOptions:
    """What is quantised, and with which texts; None leaves it to the configuration.

    `exclude` has patterns of modules that are not; `calibration` is a .jsonl of prompts.
    """

    precision: PrecisionName | None = None
    draft_precision: PrecisionName | None = None
    calibration: Path | None = None
    exclude: tuple[str, ...] = ()
    quantize_lm_head: bool = False

    def __post_init__(self) -> None:
        for name in ("precision", "draft_precision"):
            value = getattr(self, name)
            if value is not None and value not in get_args(PrecisionName):
                raise _refuse(name, value, f"one of {', '.join(get_args(PrecisionName))}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheOptions:
    """The KV caches: layout, what they hold, tokens of a page and pages of the pool."""

    kv_layout: str = LINEAR
    kv_dtype: str = CacheDtype.COMPUTE.value
    page_size: int | None = None
    kv_pages: int | None = None

    def __post_init__(self) -> None:
        dtypes = [dtype.value for dtype in CacheDtype]
        if self.kv_layout not in (LINEAR, PAGED):
            raise _refuse("kv_layout", self.kv_layout, f"{LINEAR} or {PAGED}")
        if self.kv_dtype not in dtypes:
            raise _refuse("kv_dtype", self.kv_dtype, " or ".join(dtypes))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """What only engines have: the GPU they are for, a file of timings, this project's kernels."""

    arch: str | None = None
    timing_cache: Path | None = None
    plugins: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentRequest:
    """What only a TensorRT-LLM deployment has; None is its default."""

    trtllm_version: str | None = None
    block_schedule: Path | None = None
    attention_backend: AttentionBackend | None = None
    eagle_checkpoint: str | None = None
    context_recompute_tail: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputOptions:
    """The folder to write, and how its weights get there.

    `output` None is ./NAME-bundle, or ./NAME-PROFILE for a deployment.
    """

    copy_weights: bool = False
    hash_weights: bool = False
    overwrite: bool = False
    output: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildRequest:
    """A build of `target`, a name that `targets` lists or the path of a YAML file.

    `executor` is "cpu", "tensorrt-rtx", "tensorrt" or "trtllm"; `profile` names hardware of the
    configuration.
    """

    target: str
    executor: str = CPU
    profile: str | None = None
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    limits: LimitOptions = field(default_factory=LimitOptions)
    precision: PrecisionOptions = field(default_factory=PrecisionOptions)
    caches: CacheOptions = field(default_factory=CacheOptions)
    engines: EngineRequest = field(default_factory=EngineRequest)
    deployment: DeploymentRequest = field(default_factory=DeploymentRequest)
    output: OutputOptions = field(default_factory=OutputOptions)


def _refuse(name: str, value: object, wanted: str) -> DflashError:
    return DflashError(f"{value!r} is not {wanted}", where=name, usage=True)

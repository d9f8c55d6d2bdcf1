"""The Python interface, as `import dflash_trt` shows it."""

from __future__ import annotations

import os
from pathlib import Path

from dflash_trt.building.spec import (
    BuildSpec,
    CacheOptions,
    Checkpoints,
    EngineRequest,
    LimitOptions,
    PrecisionOptions,
)
from dflash_trt.bundle.bundle import Bundle, open_bundle
from dflash_trt.bundle.support import CPU, EXECUTORS, TRTLLM
from dflash_trt.core.progress import Progress, SilentProgress
from dflash_trt.core.validation import check_value
from dflash_trt.decoding import (
    Penalties,
    Request,
    RequestFailedError,
    RequestResult,
    RequestStatistics,
    SamplingParams,
    TokenEvent,
)
from dflash_trt.errors import DflashError
from dflash_trt.pair import ChatAnswer, LoadedPair, load
from dflash_trt.sampling.token_rules import TokenRules
from dflash_trt.text.grammar import Grammar

__all__ = [
    "Bundle",
    "CacheOptions",
    "ChatAnswer",
    "Checkpoints",
    "DflashError",
    "EngineRequest",
    "Grammar",
    "LimitOptions",
    "LoadedPair",
    "Penalties",
    "PrecisionOptions",
    "Progress",
    "Request",
    "RequestFailedError",
    "RequestResult",
    "RequestStatistics",
    "SamplingParams",
    "TokenEvent",
    "TokenRules",
    "build",
    "load",
]


def build(
    target: str | os.PathLike[str] | None = None,
    output: str | Path | None = None,
    *,
    executor: str = CPU,
    profile: str | None = None,
    limits: LimitOptions | None = None,
    precision: PrecisionOptions | None = None,
    caches: CacheOptions | None = None,
    engines: EngineRequest | None = None,
    checkpoints: Checkpoints | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Bundle:
    """Builds a bundle, whole or not at all; `load(bundle.folder)` runs it.

    Args:
        target: a name that `dflash-trt targets` lists, the path of a YAML file, or a folder with
            `target/` and `draft/`; None where `checkpoints` names both.
        output: the folder to write; None is ./NAME-bundle.
        executor: "cpu", "tensorrt-rtx", "tensorrt" or "torch".
        profile: hardware of the configuration, by name.
        overwrite: replace a bundle that exists.
        progress: is told of each stage.

    Raises:
        DflashError: options that do not go together, a pair or a limit that does not fit, a
            checkpoint that cannot be found or read, a disk that refuses.
    """
    from dflash_trt.building.build import BuiltBundle
    from dflash_trt.building.build import build as run_build

    known = [name for name in EXECUTORS if name != TRTLLM]
    if executor not in known:
        what = f"{executor!r} is not one of {', '.join(known)}"
        fix = "`dflash-trt build` writes deployments" if executor == TRTLLM else None
        raise DflashError(what, where="executor", fix=fix, usage=True)
    check_value("target", target, str | os.PathLike[str] | None)
    check_value("output", output, str | os.PathLike[str] | None)
    built = run_build(
        BuildSpec(
            target=None if target is None else os.fspath(target),
            executor=executor,
            profile=profile,
            checkpoints=checkpoints or Checkpoints(),
            limits=limits or LimitOptions(),
            precision=precision or PrecisionOptions(),
            caches=caches or CacheOptions(),
            engines=engines or EngineRequest(),
            overwrite=overwrite,
            output=None if output is None else Path(output),
        ),
        progress or SilentProgress(),
    )
    assert isinstance(built, BuiltBundle)
    return open_bundle(built.folder)

"""Tiny random pairs as checkpoints, bundles and references, each built once a session."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_trt.backends.onnxruntime.executor import OnnxRuntimeExecutor
from dflash_trt.backends.registry import open_executor
from dflash_trt.backends.tensorrt.build.builder import EngineOptions
from dflash_trt.building.bundle_writer import build_bundle
from dflash_trt.building.spec import BuildSpec, CacheOptions
from dflash_trt.bundle.bundle import Bundle, open_bundle
from dflash_trt.core.progress import Progress, SilentProgress
from dflash_trt.graph.bindings import Owner
from dflash_trt.graph.form import Precision
from dflash_trt.models.build_config import BuildConfig
from dflash_trt.models.draft import read_draft
from dflash_trt.models.pair_check import Pair, check_pair
from dflash_trt.models.target import read_target
from tests.shared import Shared

if TYPE_CHECKING:  # PyTorch comes with them: seconds for every process that a test starts
    from tests.reference.checkpoints import Family
    from tests.reference.draft import ReferenceDraft

TWO_KINDS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 24}
"""Of a draft with a layer of each kind."""
FIT_PROMPTS = ([3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8])


@dataclass(frozen=True)
class TinyPair:
    """A pair in every form that tests need."""

    folder: Path
    pair: Pair
    bundle: Bundle

    @cached_property
    def reference(self) -> Any:
        """The target as transformers runs it, in float32."""
        from tests.reference.generate import load_target

        return load_target(self.folder / "target")

    @cached_property
    def reference_draft(self) -> ReferenceDraft:
        from tests.reference.draft import ReferenceDraft

        return ReferenceDraft.load(self.folder / "draft", self.reference)

    def open(self, threads: int = 1) -> OnnxRuntimeExecutor:
        executor = open_executor(self.bundle, threads=threads)
        assert isinstance(executor, OnnxRuntimeExecutor)
        return executor


class PairFactory:
    """Calls build a pair; equal arguments get the same one.

    Checkpoints are made once for all workers of a run, and copied: tests may write beside them.

    Args of a call:
        family: the target's architecture.
        target, draft: keywords of `write_target` and `write_draft`.
        dflash: keys added to the draft's `dflash_config`.
        fit_steps: optimiser steps that make the draft agree with the target; 0 leaves it random.
        max_seq_len, max_batch: of the bundle; also `prefill_chunk`, None leaves the usual one.
        copy_weights: whether the bundle gets weight files of its own.
        paging: `page_size` and `pages` of a pool; None builds linear KV caches.
        kv_dtype: value of a `CacheDtype`, what the caches hold.
        quantize: keywords of `quantize_folder` for "target", "draft" or both, applied last.
        int8: the models that compute in eight bits.
    """

    def __init__(self, root: Path, shared: Shared) -> None:
        self._root = root
        self._shared = shared
        self._pairs: dict[str, TinyPair] = {}
        import torch

        # One thread is enough for tiny models, and keeps the machine's cores for ONNX Runtime.
        torch.set_num_threads(1)

    def __call__(
        self,
        family: Family = "qwen3",
        target: Mapping[str, Any] | None = None,
        draft: Mapping[str, Any] | None = None,
        *,
        dflash: Mapping[str, Any] | None = None,
        fit_steps: int = 0,
        max_seq_len: int = 512,
        max_batch: int = 4,
        copy_weights: bool = False,
        quantize: Mapping[str, Mapping[str, Any]] | None = None,
        paging: Mapping[str, int] | None = None,
        kv_dtype: str = "auto",
        prefill_chunk: int | None = None,
        int8: Sequence[Owner] = (),
    ) -> TinyPair:
        limits = (max_seq_len, max_batch, copy_weights, paging, kv_dtype, prefill_chunk, int8)
        arguments = (family, target, draft, dflash, fit_steps, limits, quantize)
        key = json.dumps(arguments, sort_keys=True)
        if key in self._pairs:
            return self._pairs[key]
        folder = self._root / f"pair-{len(self._pairs)}"
        checkpoints = (family, target or {}, draft or {}, dflash or {}, fit_steps, quantize or {})
        made = self._shared.folder(_write_checkpoints, *checkpoints)
        shutil.copytree(made, folder)
        spec = BuildSpec(copy_weights=copy_weights, caches=caches(paging, kv_dtype))
        sizes = {"max_seq_len": max_seq_len, "max_batch": max_batch}
        if prefill_chunk is not None:
            sizes["prefill_chunk"] = prefill_chunk
        built = bundle_pair(folder, spec, int8, **sizes)
        self._pairs[key] = built
        return built


def caches(paging: Mapping[str, int] | None = None, kv_dtype: Any = "auto") -> CacheOptions:
    """The caches' options: `paging` has page_size and pages, where there are any."""
    if paging is None:
        return CacheOptions(kv_dtype=kv_dtype)
    return CacheOptions(
        kv_layout="paged",
        kv_dtype=kv_dtype,
        page_size=paging.get("page_size"),
        kv_pages=paging.get("pages"),
    )


def bundle_pair(
    folder: Path, spec: BuildSpec, int8: Sequence[Owner] = (), **limits: int
) -> TinyPair:
    """The checkpoints in `folder`/target and draft, and their bundle beside them."""
    pair = check_pair(read_target(folder / "target"), read_draft(folder / "draft"))
    return TinyPair(folder, pair, write_bundle(pair, folder / "bundle", spec, int8=int8, **limits))


def write_bundle(
    pair: Pair,
    folder: Path,
    spec: BuildSpec,
    progress: Progress | None = None,
    engines: EngineOptions | None = None,
    int8: Sequence[Owner] = (),
    torch: Precision | None = None,
    **limits: int,
) -> Bundle:
    """A bundle in `folder`; `limits` are keys of a build configuration."""
    config = BuildConfig.model_validate(
        {
            "description": "a tiny random pair",
            "target": {"checkpoint": "target"},
            "draft": {"checkpoint": "draft"},
            "max_seq_len": 512,
            "max_batch": 4,
        }
        | limits
    )
    told = progress or SilentProgress()
    given = {"engines": engines, "torch": torch, "int8": int8}
    build_bundle(pair, config, "tiny", folder, spec, told, **given)  # type: ignore[arg-type]
    return open_bundle(folder)


def _write_checkpoints(
    folder: Path,
    family: Family,
    target: Mapping[str, Any],
    draft: Mapping[str, Any],
    dflash: Mapping[str, Any],
    fit_steps: int,
    quantize: Mapping[str, Mapping[str, Any]],
) -> None:
    from tests.reference.checkpoints import write_draft, write_target

    write_target(folder / "target", family, **target)
    write_draft(folder / "draft", folder / "target", **draft)
    if dflash:
        _extend_dflash_config(folder / "draft" / "config.json", dflash)
    if fit_steps:
        from tests.reference.generate import fit_draft, load_target

        reference = load_target(folder / "target")
        fit_draft(folder / "draft", reference, FIT_PROMPTS, steps=fit_steps)
    for owner, options in quantize.items():
        from tests.reference.quantized import quantize_folder

        quantize_folder(folder / owner, **options)


def _extend_dflash_config(path: Path, keys: Mapping[str, Any]) -> None:
    config = json.loads(path.read_text(encoding="utf-8"))
    config["dflash_config"] |= keys
    path.write_text(json.dumps(config), encoding="utf-8")

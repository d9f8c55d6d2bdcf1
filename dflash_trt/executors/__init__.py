"""Executors: one interface (base.py), one module per library that runs the graphs."""

from __future__ import annotations

from collections.abc import Iterable

from dflash_trt.bundle.bundle import Bundle
from dflash_trt.errors import DflashError
from dflash_trt.executors.base import Executor, ExecutorLimits
from dflash_trt.graph.bindings import GraphName


def check_runnable(bundle: Bundle) -> None:
    """Raises DflashError when no executor of this version runs the bundle; loads nothing."""
    manifest = bundle.manifest
    if manifest.engines is not None:
        raise DflashError(
            f"holds {manifest.executor} engines for {manifest.engines.arch}; this version builds "
            "such engines but does not run them yet",
            where=bundle.folder,
            fix="build with --executor cpu to run here",
        )


def open_executor(
    bundle: Bundle, *, threads: int | None = None, graphs: Iterable[GraphName] = ()
) -> Executor:
    """The executor that the bundle was built for.

    `threads` bounds a CPU executor's intra-op threads; None leaves it to the library. `graphs`
    are opened now, the others when they are first used.
    """
    check_runnable(bundle)
    # Imported here: a command that only reads a bundle need not load ONNX Runtime.
    from dflash_trt.executors.caches import CacheLayout, CacheShape
    from dflash_trt.executors.onnxruntime import OnnxRuntimeExecutor

    manifest = bundle.manifest
    target, draft, limits = manifest.target, manifest.draft, manifest.limits
    executor = OnnxRuntimeExecutor(
        bundle.folder,
        ExecutorLimits(
            max_batch=limits.max_batch,
            max_seq_len=limits.max_seq_len,
            block_size=limits.block_size,
            vocab_size=target.vocab_size,
            mask_token_id=draft.mask_token_id,
        ),
        CacheLayout(
            target.layers,
            CacheShape(target.kv_heads, target.head_dim),
            draft.layers,
            CacheShape(draft.kv_heads, draft.head_dim),
        ),
        threads=threads,
    )
    executor.preload(graphs)
    return executor

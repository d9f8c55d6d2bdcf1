"""What engines with plugins need beside weights and caches: the shares of split attention."""

from __future__ import annotations

from dflash_trt.bundle.manifest import DraftDims, Manifest, TargetDims
from dflash_trt.core.limits import Limits
from dflash_trt.graph.form import GraphForm
from dflash_trt.kernels.attention import SPLIT_ATTENTION, scratch_bytes


def split_scratch(
    target: TargetDims, draft: DraftDims, limits: Limits, form: GraphForm, capacity: int
) -> int:
    """Bytes that attention's shares take in the largest call of engines of graphs of `form`.

    `capacity` is the length of their caches. The draft's attention is the plugins', the target's
    where only kernels read its caches. Layers run one after another and engines in turn, so that
    the largest is all there is.
    """
    calls: list[tuple[TargetDims | DraftDims, int, int]]
    calls = [(draft, limits.max_batch, limits.block_size)]
    if form.has_kernel_caches:
        calls += [
            (target, limits.max_batch, limits.block_size),
            (target, 1, limits.prefill_chunk),
        ]
    return max(
        scratch_bytes(
            capacity=capacity,
            block_size=limits.block_size,
            window=window or 0,
            query_heads=dims.heads,
            head_dim=dims.head_dim,
            batch=batch,
            rows=rows,
        )
        for dims, batch, rows in calls
        for window in set(dims.layer_windows or [None])
    )


def bundle_scratch(manifest: Manifest) -> int:
    """Bytes of `split_scratch` of a bundle; 0 where its engines do not split attention."""
    engines = manifest.engines
    if engines is None or not any(
        name.startswith(SPLIT_ATTENTION) for one in engines.files for name in one.operations
    ):
        return 0
    target, draft, limits = manifest.target, manifest.draft, manifest.limits
    return split_scratch(target, draft, limits, manifest.graph_form, engines.cache_length)

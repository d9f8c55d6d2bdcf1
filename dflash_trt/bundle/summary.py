"""What a bundle weighs: parameters, cache bytes per token, memory for a batch and a context."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dflash_trt.bundle.manifest import Manifest, ModelDims

ITEM_BYTES = 4  # float32 on the CPU executor


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes for `batch` sequences of `context` tokens each.

    Weights count in the compute type, as ONNX Runtime holds them after loading. `draft_head` is
    the target's output head once more: the draft's session packs its own copy. Caches count the
    tokens; the CPU executor allocates up to twice that, since its length doubles.
    """

    batch: int
    context: int
    target_weights: int
    draft_weights: int
    draft_head: int
    target_cache: int
    draft_cache: int

    @property
    def total(self) -> int:
        weights = self.target_weights + self.draft_weights + self.draft_head
        return weights + self.target_cache + self.draft_cache


def cache_bytes_per_token(dims: ModelDims) -> int:
    """Bytes of K and V of every layer for one token of one sequence."""
    return 2 * dims.layers * dims.kv_heads * dims.head_dim * ITEM_BYTES


def estimate_memory(manifest: Manifest, batch: int, context: int) -> MemoryEstimate:
    """Memory of a running pair: see MemoryEstimate."""
    tokens = batch * context
    return MemoryEstimate(
        batch=batch,
        context=context,
        target_weights=manifest.target.parameters * ITEM_BYTES,
        draft_weights=manifest.draft.parameters * ITEM_BYTES,
        draft_head=manifest.target.vocab_size * manifest.target.hidden_size * ITEM_BYTES,
        target_cache=tokens * cache_bytes_per_token(manifest.target),
        draft_cache=tokens * cache_bytes_per_token(manifest.draft),
    )


def summarize(manifest: Manifest, batch: int, context: int) -> dict[str, Any]:
    """The figures of `inspect`, as JSON."""
    memory = estimate_memory(manifest, batch, context)
    return {
        "name": manifest.name,
        "created_by": manifest.created_by,
        "executor": manifest.executor,
        "target": manifest.target.model_dump(),
        "draft": manifest.draft.model_dump(),
        "limits": manifest.limits.model_dump(),
        "weights": manifest.weights,
        "tokenizer": manifest.tokenizer,
        "libraries": manifest.libraries,
        "cache_bytes_per_token": {
            "target": cache_bytes_per_token(manifest.target),
            "draft": cache_bytes_per_token(manifest.draft),
        },
        "memory_bytes": {
            "batch": memory.batch,
            "context": memory.context,
            "target_weights": memory.target_weights,
            "draft_weights": memory.draft_weights,
            "draft_head": memory.draft_head,
            "target_cache": memory.target_cache,
            "draft_cache": memory.draft_cache,
            "total": memory.total,
        },
        "files": [file.model_dump() for file in manifest.files],
    }

"""What a bundle weighs: parameters, cache bytes per token, memory for a batch and a context."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dflash_trt.bundle.manifest import Manifest, ModelDims
from dflash_trt.graph.form import Precision

PATTERNS_SHOWN = 4


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes for `batch` sequences of `context` tokens each.

    On the CPU weights count in the compute type, as ONNX Runtime holds them after loading;
    `draft_head` is the target's output head once more: the draft's session packs its own copy.
    Caches count the tokens; the CPU executor allocates up to twice that, since its length doubles.
    Engines count as their files weigh: the draft's holds its own embedding and output head.
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


def cache_bytes_per_token(dims: ModelDims, item_bytes: int) -> int:
    """Bytes of K and V of every layer for one token of one sequence."""
    return 2 * dims.layers * dims.kv_heads * dims.head_dim * item_bytes


def cache_bytes(manifest: Manifest) -> tuple[int, int]:
    """Bytes per token of the target's and the draft's caches, in the compute type."""
    item = Precision(manifest.compute_dtype).item_bytes
    return (
        cache_bytes_per_token(manifest.target, item),
        cache_bytes_per_token(manifest.draft, item),
    )


def engine_bytes(manifest: Manifest) -> dict[str, int]:
    """Size of each engine's file, by graph; empty for a CPU bundle."""
    sizes = {file.path: file.bytes for file in manifest.files}
    engines = manifest.engines.files if manifest.engines else []
    return {engine.graph: sizes[engine.path] for engine in engines}


def precision_line(manifest: Manifest) -> str:
    """What target and draft are quantised in, with a comma behind; empty where neither is."""
    models = {"target": manifest.target, "draft": manifest.draft}
    if all(dims.quantization is None for dims in models.values()):
        return ""
    names = (f"{owner} in {'/'.join(_formats(dims))}" for owner, dims in models.items())
    return f"{', '.join(names)}, "


def _formats(dims: ModelDims) -> list[str]:
    if dims.quantization is not None and dims.quantization.linears:
        return sorted(dims.quantization.linears)
    return dims.storage_dtypes


def quantization_line(dims: ModelDims) -> str | None:
    """How a model is quantised, and what its checkpoint states that is not used."""
    quantization = dims.quantization
    if quantization is None:
        return None
    counts = [f"{count} linears in {name}" for name, count in quantization.linears.items()]
    parts = [", ".join(counts) or "no linear quantised"]
    if quantization.excluded:
        shown = ", ".join(quantization.excluded[:PATTERNS_SHOWN])
        more = len(quantization.excluded) - PATTERNS_SHOWN
        parts.append(f"excluded {shown}{f' and {more} more' if more > 0 else ''}")
    if quantization.kv_cache is not None or quantization.kv_scales:
        stated = quantization.kv_cache or "quantised"
        parts.append(f"{stated} KV cache not used ({quantization.kv_scales} scales)")
    return "; ".join(parts)


def estimate_memory(manifest: Manifest, batch: int, context: int) -> MemoryEstimate:
    """Memory of a running pair: see MemoryEstimate."""
    tokens = batch * context
    target, draft = manifest.target, manifest.draft
    item = Precision(manifest.compute_dtype).item_bytes
    engines = engine_bytes(manifest)
    target_token, draft_token = cache_bytes(manifest)
    return MemoryEstimate(
        batch=batch,
        context=context,
        target_weights=engines.get("target", target.parameters * item),
        draft_weights=engines.get("draft", draft.parameters * item),
        draft_head=0 if engines else target.vocab_size * target.hidden_size * item,
        target_cache=tokens * target_token,
        draft_cache=tokens * draft_token,
    )


def summarize(manifest: Manifest, batch: int, context: int) -> dict[str, Any]:
    """The figures of `inspect`, as JSON."""
    memory = estimate_memory(manifest, batch, context)
    target_token, draft_token = cache_bytes(manifest)
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
            "target": target_token,
            "draft": draft_token,
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
        "engines": manifest.engines.model_dump() if manifest.engines else None,
    }

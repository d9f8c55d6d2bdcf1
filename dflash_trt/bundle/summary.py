"""What a bundle weighs: parameters, cache bytes per token, memory for a batch and a context."""

from __future__ import annotations

import re
from dataclasses import asdict, replace
from typing import Any

from dflash_trt.bundle.dims import ExpertDims, ModelDims, TargetDims
from dflash_trt.bundle.manifest import Manifest
from dflash_trt.bundle.memory.cache_bytes import cache_bytes_per_token, state_bytes
from dflash_trt.bundle.memory.memory import bundle_memory, page_kinds, token_bytes
from dflash_trt.core.formats import INT8_BLOCK
from dflash_trt.errors import first_few
from dflash_trt.graph.caches.native import DECOMPOSED
from dflash_trt.graph.form import Precision
from dflash_trt.graph.gated_delta import STEP
from dflash_trt.graph.gated_delta_groups import GROUPS, group_rows
from dflash_trt.hardware.kernels import BLOCK_ATTENTION
from dflash_trt.models.moe import EXPERT_STORAGE
from dflash_trt.models.quantized_weights import are_fp8

PATTERNS_SHOWN = 4
PACKED = frozenset(EXPERT_STORAGE.values())
"""Formats of experts whose values share bytes."""


_MODEL = re.compile(r"([a-z]+)[-_]?(\d+(?:\.\d+)?)", re.IGNORECASE)


def versions_apart(manifest: Manifest) -> tuple[str, str] | None:
    """The names of target and draft, where they say the same model in other versions."""
    names = manifest.target.checkpoint, manifest.draft.checkpoint
    target, draft = map(_MODEL.match, names)
    if target is None or draft is None:
        return None
    is_same = target[1].lower() == draft[1].lower()
    return names if is_same and target[2] != draft[2] else None


def cache_line(manifest: Manifest) -> str:
    """How the KV caches are laid out, and what they hold where that is not the compute type."""
    layout = page_pool_line(manifest) or "linear"
    if manifest.kv_dtype == "auto":
        return layout
    models = (manifest.target, manifest.draft)
    scales = sum(
        dims.quantization.kv_scales
        for dims in models
        if dims.quantization is not None and are_fp8(dims.quantization.kv_cache)
    )
    wanted = sum(2 * dims.layers for dims in models)
    stated = f"{scales} of {wanted} scales from the checkpoints, else 1"
    if scales in (0, wanted):
        stated = "scales from the checkpoints" if scales else "scales of 1"
    held = "codes"
    if not manifest.graph_form.holds_codes:
        narrow = replace(manifest.graph_form, precision=Precision.BFLOAT16)
        of_engines = (cache_bytes_per_token(dims.sizes, narrow) for dims in models)
        held = (
            "values kept as float32; engines' codes take "
            + " + ".join(f"{size:,}" for size in of_engines)
            + " bytes per token"
        )
    return f"{layout}; FP8 (E4M3) {held}, {stated}"


def page_pool_line(manifest: Manifest) -> str | None:
    """How the KV caches are paged; None where they are linear."""
    pool = manifest.page_pool
    if pool is None:
        return None
    kinds = page_kinds(manifest)
    pages, page = kinds.pop(None)
    layers = "other" if kinds else "all"
    return (
        f"paged, {pages:,} pages of {pool.page_size} tokens, {page:,} bytes each for {layers} "
        "layers of target and draft; "
        + "".join(
            f"layers with a window of {window:,} keep what rows to come see, in {own:,} pages of "
            f"{size:,} bytes; "
            for window, (own, size) in kinds.items()
        )
        + f"at most {pool.positions:,} tokens in "
        f"{pages * page + sum(own * size for own, size in kinds.values()):,} bytes, "
        + ("taken as tokens come" if manifest.is_on_cpu else "allocated whole")
    )


def precision_line(manifest: Manifest) -> str:
    """What target and draft are quantised in, with a comma behind; empty where neither is."""
    models = {"target": manifest.target, "draft": manifest.draft}
    if all(dims.quantization is None and dims.int8 is None for dims in models.values()):
        return ""
    names = (f"{owner} in {'/'.join(_formats(dims))}" for owner, dims in models.items())
    return f"{', '.join(names)}, "


def storage_formats(dims: ModelDims) -> list[str]:
    """The types that weights are stored in; of packed experts the format, not its bytes' type."""
    experts = _packed_experts(dims)
    if experts is None:
        return dims.storage_dtypes
    return sorted({*dims.storage_dtypes, experts.storage_dtype} - {"U8"})


def _formats(dims: ModelDims) -> list[str]:
    if dims.int8 is not None:
        return ["INT8"]
    if dims.quantization is not None and dims.quantization.linears:
        return sorted(dims.quantization.linears)
    return storage_formats(dims)


def _packed_experts(dims: ModelDims) -> ExpertDims | None:
    """A target's experts where they are in a four-bit format."""
    experts = dims.experts if isinstance(dims, TargetDims) else None
    return experts if experts is not None and experts.storage_dtype in PACKED else None


def quantization_line(dims: ModelDims, kv_dtype: str) -> str | None:
    """How a model is quantised, and what its checkpoint states that is not used.

    `kv_dtype` is the manifest's: with "fp8" the scales of an FP8 KV cache are used.
    """
    quantization = dims.quantization
    if quantization is None:
        return None
    counts = [f"{count} linears in {name}" for name, count in quantization.linears.items()]
    experts = _packed_experts(dims)
    if experts is not None:
        counts.append(f"experts in {experts.storage_dtype}")
    parts = [", ".join(counts) or "no linear quantised"]
    if quantization.excluded:
        parts.append(f"excluded {first_few(quantization.excluded, PATTERNS_SHOWN)}")
    is_used = kv_dtype == "fp8" and are_fp8(quantization.kv_cache)
    if not is_used and (quantization.kv_cache is not None or quantization.kv_scales):
        stated = quantization.kv_cache or "quantised"
        parts.append(f"{stated} KV cache not used ({quantization.kv_scales} scales)")
    return "; ".join(parts)


def int8_line(dims: ModelDims) -> str | None:
    """What of a model is computed in eight bits, and what is not; None where nothing is."""
    one = dims.int8
    if one is None:
        return None
    rest = f"; in floats: {first_few(one.kept, PATTERNS_SHOWN)}" if one.kept else ""
    size = one.weight_bytes / (1 << 20)
    return f"{one.matrices} products in INT8, blocks of {INT8_BLOCK}, {size:,.1f} MiB{rest}"


def unscaled_models(manifest: Manifest) -> list[str]:
    """The models whose FP8 caches have no scale: what is beyond 448 there is clipped."""
    if manifest.kv_dtype != "fp8":
        return []
    stated = {"target": manifest.target.quantization, "draft": manifest.draft.quantization}
    return [
        owner
        for owner, quantization in stated.items()
        if quantization is None or not quantization.kv_scales or not are_fp8(quantization.kv_cache)
    ]


def experts_line(manifest: Manifest) -> str | None:
    """The target's experts, and how the executor runs them; None where it has none."""
    experts = manifest.target.experts
    if experts is None:
        return None
    form = "each chosen one taken once a call, row by row (a loop in the graph)"
    if manifest.compute_dtype != "float32":
        form = "each row gathers the weights of its own (no MoE kernel is used)"
    shared = f", beside one of ffn {experts.shared} for every row" if experts.shared else ""
    return (
        f"{experts.experts} experts of ffn {experts.intermediate_size} in "
        f"{experts.storage_dtype}, {experts.chosen} a row{shared}: {form}"
    )


def attention_line(manifest: Manifest) -> str | None:
    """The target's windows, sinks and heads of a second kind; None where layers are plain."""
    target = manifest.target
    sliding = [window for window in target.layer_windows if window is not None]
    parts = []
    if sliding:
        sizes = "/".join(str(size) for size in sorted(set(sliding)))
        parts.append(f"{len(sliding)} of {target.layers} layers see {sizes} positions")
    if target.has_sinks:
        parts.append("attention sinks")
    if (full := target.full) is not None:
        values = ", K and V of one projection" * full.keys_are_values
        heads = f"{target.heads}/{full.kv_heads} × {full.head_dim}"
        form = ""
        if _runs(manifest, DECOMPOSED):
            form = ", their attention decomposed (no fused kernel has such heads)"
        elif _runs(manifest, BLOCK_ATTENTION):
            form = ", their attention by a kernel of ours"
        parts.append(f"those that see everything have heads {heads}{values}{form}")
    return "; ".join(parts) or None


def recurrent_line(manifest: Manifest) -> str | None:
    """The target's recurrent layers, and what a sequence has in them; None where it has none."""
    one = manifest.target.recurrent
    if one is None:
        return None
    held = state_bytes(manifest.target.sizes, manifest.graph_form)
    shared = "as are prefixes' in copies" if manifest.page_pool else "prefixes are not shared"
    form = ""
    if _runs(manifest, STEP):
        form = f"; {STEP}, a kernel of ours, which has the rows twice"
    elif _runs(manifest, GROUPS):
        rows = group_rows(manifest.limits.block_size)
        form = f"; decomposed, {rows} rows at once (no recurrent kernel is used)"
    return (
        f"{len(one.layers)} of {manifest.target.layers} layers are Gated DeltaNet, "
        f"{one.key_heads}/{one.value_heads} heads × {one.head_dim}: {held:,} bytes of state and "
        f"rows a sequence; {shared}{form}"
    )


def _runs(manifest: Manifest, function: str) -> bool:
    """Whether the target's engines were built of graphs that call `function`."""
    files = [] if manifest.engines is None else manifest.engines.files
    operations = [name for one in files if one.graph != "draft" for name in one.operations]
    return any(name.startswith(function) for name in operations)


def draft_tokens_line(manifest: Manifest) -> str | None:
    """What the draft chooses among, and by what of its own; None for all, by the target's."""
    count, owned = manifest.draft.token_count, manifest.draft.owned
    among = [] if count is None else [f"chooses among {count:,} tokens, the target among all"]
    return "; ".join([*among, *(f"has an {one} of its own" for one in owned)]) or None


def dflash2_line(manifest: Manifest) -> str | None:
    """What a DFlash 2 draft has beside DFlash's layers; None of any other."""
    if (one := manifest.draft.dflash2) is None:
        return None
    return (
        f"convolutions over two rows, in groups of {one.group} channels; a selector of rank "
        f"{one.rank} among the {one.top_k} likeliest tokens of a slot"
    )


def summarize(manifest: Manifest) -> dict[str, Any]:
    """The figures of `inspect`, as JSON."""
    memory, stated = bundle_memory(manifest), manifest.model_dump()
    first = ("name", "created_by", "executor", "target", "draft", "limits", "weights", "tokenizer")
    return {
        **{key: stated[key] for key in (*first, "libraries")},
        "cache_bytes_per_token": dict(zip(("target", "draft"), token_bytes(manifest), strict=True)),
        "kv_layout": "linear" if manifest.page_pool is None else "paged",
        **{key: stated[key] for key in ("page_pool", "kv_dtype")},
        "memory_bytes": {**asdict(memory), "total": memory.total},
        **{key: stated[key] for key in ("files", "engines")},
    }

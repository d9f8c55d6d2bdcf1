"""What a manifest says of a pair's two models, from their checkpoints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from dflash_trt.bundle.full_dims import full_dims
from dflash_trt.bundle.manifest import DraftDims, ExpertDims, QuantizationSummary, TargetDims
from dflash_trt.bundle.recurrent_dims import recurrent_dims
from dflash_trt.checkpoints.decoder import DecoderSpec
from dflash_trt.checkpoints.pair import Pair
from dflash_trt.checkpoints.quantized_weights import (
    count_parameters,
    is_kv_scale,
    is_scale,
    quantized_linears,
)
from dflash_trt.checkpoints.target import TargetSpec
from dflash_trt.errors import printable


def target_dims(pair: Pair, end_ids: Sequence[int]) -> TargetDims:
    """The target's part of a manifest; `end_ids` are all that end a text."""
    target = pair.target
    return TargetDims(
        **_decoder_dims(target),
        family=target.family,
        layer_windows=list(target.layer_windows) if any(target.layer_windows) else [],
        has_sinks=target.has_sinks,
        experts=_expert_dims(target),
        recurrent=recurrent_dims(target.sizes.layers),
        full=full_dims(target.sizes),
        vocab_size=target.vocab_size,
        max_position_embeddings=target.max_position_embeddings,
        eos_token_ids=list(end_ids),
    )


def _expert_dims(target: TargetSpec) -> ExpertDims | None:
    moe = target.moe
    if moe is None:
        return None
    stored = {role: entry for role, entry in target.weights.items() if ".experts." in role}
    dtypes = sorted({entry.dtype for entry in stored.values()})
    return ExpertDims(
        experts=moe.experts,
        chosen=moe.chosen,
        intermediate_size=moe.intermediate_size,
        shared=moe.shared,
        storage_dtype=moe.storage if moe.storage != "float" else "/".join(dtypes),
        parameters=count_parameters(stored),
        weight_bytes=sum(entry.length for entry in stored.values()),
    )


def draft_dims(pair: Pair) -> DraftDims:
    """The draft's part of a manifest."""
    draft, ids = pair.draft, pair.draft_token_ids
    return DraftDims(
        **_decoder_dims(draft),
        kind=draft.kind,
        anchor_drafts=draft.anchor_drafts,
        trained_block_size=draft.block_size,
        mask_token_id=draft.mask_token_id,
        target_layer_ids=list(draft.target_layer_ids),
        layer_windows=list(draft.layer_windows),
        layer_causal=list(draft.layer_causal),
        token_count=None if ids is None else len(ids),
    )


def _decoder_dims(spec: DecoderSpec) -> dict[str, Any]:
    """The fields of ModelDims."""
    sizes = spec.sizes
    return {
        "layers": len(sizes.layers),
        "hidden_size": sizes.hidden_size,
        "heads": sizes.layer.heads,
        "kv_heads": sizes.layer.kv_heads,
        "head_dim": sizes.layer.head_dim,
        "intermediate_size": sizes.intermediate_size,
        "parameters": count_parameters(spec.weights),
        "weight_bytes": sum(entry.length for entry in spec.weights.values()),
        "storage_dtypes": sorted(
            {entry.dtype for role, entry in spec.weights.items() if not is_scale(role)}
        ),
        "checkpoint": printable(spec.checkpoint.path.name),
        "quantization": _quantization(spec),
    }


def _quantization(spec: DecoderSpec) -> QuantizationSummary | None:
    stated = spec.quantization
    if stated is None:
        return None
    return QuantizationSummary(
        linears=dict(Counter(quantized_linears(spec.weights).values())),
        excluded=[printable(one) for one in stated.excluded],
        kv_cache=stated.kv_cache_algorithm,
        kv_scales=sum(map(is_kv_scale, spec.checkpoint.tensors)),
    )

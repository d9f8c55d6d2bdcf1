"""Bytes of weights: of a model by its shape, and of a checkpoint's tensors in an engine."""

from __future__ import annotations

from collections.abc import Mapping

from dflash_trt.bundle.memory.gpu_layout import ONE_GPU, GpuLayout
from dflash_trt.core.formats import Format
from dflash_trt.models.quantized_weights import FLOAT_DTYPES, is_packed_expert
from dflash_trt.models.safetensors_header import TensorEntry
from dflash_trt.models.sizes import (
    DecoderSizes,
    DraftShape,
    LayerSizes,
    ModelShape,
    TargetShape,
)


def attention_bytes(model: ModelShape, layer: LayerSizes, layout: GpuLayout) -> float:
    """Bytes on one GPU of one layer's q, k, v and o, or of what a recurrent one has for them."""
    if layer.recurrent is not None:
        share = model.attention_weights(layer) / layout.attention_ways
        return model.attention_format.bytes(share)
    width = 2 * model.sizes.hidden_size * layer.head_dim
    query = width * (1 + layer.has_gate / 2) * layer.heads / layout.attention_ways
    key_value = width * layer.kv_heads / layout.kv_ways(layer) / (1 + layer.keys_are_values)
    return model.attention_format.bytes(query + key_value)


def mlp_bytes(model: ModelShape, layout: GpuLayout) -> float:
    """Bytes on one GPU of one layer's MLP: of all its experts, shared one and router included."""
    if model.experts is None:
        weights = model.mlp_weights / layout.attention_ways
    else:
        weights = model.experts.experts * model.mlp_weights / layout.gpus
        weights += model.shared_weights / layout.attention_ways
    return model.mlp_format.bytes(weights) + 2 * model.router_weights


def vocab_bytes(model: TargetShape, layout: GpuLayout = ONE_GPU) -> float:
    """Bytes on one GPU of embedding and output head, in bf16."""
    matrices = 1 if model.tie_word_embeddings else 2
    return 2 * matrices * model.vocab_weights / layout.attention_ways


def _layer_bytes(model: ModelShape, layout: GpuLayout) -> float:
    mlp = mlp_bytes(model, layout)
    return sum(
        len(layers) * (attention_bytes(model, layer, layout) + mlp)
        for layer, layers in model.sizes.kinds.items()
    )


def target_weight_bytes(model: TargetShape, layout: GpuLayout = ONE_GPU) -> float:
    """Bytes of a target's weights on one GPU of `layout`; norms and biases are not counted."""
    return _layer_bytes(model, layout) + vocab_bytes(model, layout)


def draft_weight_bytes(draft: DraftShape, layout: GpuLayout = ONE_GPU) -> float:
    """Bytes of a draft's own weights on one GPU of `layout`: layers, and in bf16 what is beside."""
    beside = draft.fc_weights + draft.markov_weights + draft.dflash2_weights
    return _layer_bytes(draft, layout) + 2 * beside / layout.attention_ways


def shape_weight_bytes(target: TargetShape, draft: DraftShape) -> tuple[int, int]:
    """Bytes of a target's and its draft's weights in their engines, by their shapes.

    Packed experts count as `engine_weight_bytes` counts them, four times their bytes. The draft's
    engine has an embedding and an output head of its own.
    """
    weights = target_weight_bytes(target)
    if target.experts is not None and target.mlp_format is not Format.BF16:
        experts = target.experts.experts * target.mlp_weights * len(target.sizes.layers)
        weights += 3 * target.mlp_format.bytes(experts)
    return int(weights), int(draft_weight_bytes(draft) + vocab_bytes(target))


def engine_weight_bytes(
    weights: Mapping[str, TensorEntry], item_bytes: int, planned: Mapping[str, int]
) -> int:
    """Bytes of a checkpoint's weights in an engine that computes in items of that size.

    `planned` has the bytes of those that are going to be quantised.
    """
    sizes = {
        role: entry.num_elements * (item_bytes if entry.dtype in FLOAT_DTYPES else 1)
        for role, entry in weights.items()
    }
    # Casts are folded: the bytes of MXFP4 experts become the int32 that they are looked up by.
    packed = {role: 4 * size for role, size in sizes.items() if is_packed_expert(role)}
    return sum(planned.get(role, size) for role, size in (sizes | packed).items())


def gathered_bytes(sizes: DecoderSizes, item_bytes: int) -> int:
    """Bytes of expert weights that one row gathers in one layer of an engine; 0 without experts."""
    experts = sizes.experts
    if experts is None:
        return 0
    return 3 * experts.chosen * experts.intermediate_size * sizes.hidden_size * item_bytes

"""Memory of a pair on GPUs: weights, both KV caches, workspace, and how many users fit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dflash_trt.errors import DflashError
from dflash_trt.hardware.gpu import Gpu
from dflash_trt.planning.formats import FORMATS
from dflash_trt.planning.shape import DraftShape, ModelShape

KV_ITEM_BYTES = 2
RUNTIME_BYTES = 2 * 10**9
"""Of CUDA's context, libraries and captured graphs on one GPU: an allowance, not a measurement."""
LOGITS_ITEM_BYTES = 4

AttentionSplit = Literal["tensor", "data"]


@dataclass(frozen=True, slots=True)
class Layout:
    """How one replica of a model lies on GPUs.

    Args:
        gpus: of one replica.
        attention: "tensor": heads, MLP and vocabulary are split, and every GPU works on every
            sequence. "data": each GPU has all attention weights and its own sequences, and
            experts are dealt out whole (expert parallelism).
    """

    gpus: int = 1
    attention: AttentionSplit = "tensor"

    @property
    def label(self) -> str:
        if self.gpus == 1:
            return "1 GPU"
        return f"{'TP' if self.attention == 'tensor' else 'DP+EP'} {self.gpus}"

    @property
    def attention_ways(self) -> int:
        """GPUs that attention, vocabulary and draft are split over."""
        return self.gpus if self.attention == "tensor" else 1

    def kv_ways(self, model: ModelShape) -> int:
        """GPUs that KV heads are split over; GPUs beyond their number hold copies."""
        return min(self.attention_ways, model.kv_heads)

    def sequences_per_gpu(self, batch: int) -> int:
        """Sequences of the replica's `batch` whose KV cache one GPU reads."""
        return batch if self.attention == "tensor" else -(-batch // self.gpus)

    def check(self, *models: ModelShape) -> None:
        """Raises DflashError where the layout cannot hold a model."""
        for model in models:
            ways = self.attention_ways
            if model.heads % ways or (model.kv_heads % ways and ways % model.kv_heads):
                raise DflashError(
                    f"{ways} GPUs do not divide {model.heads} attention heads and "
                    f"{model.kv_heads} KV heads",
                    where="--tensor-parallel",
                    usage=True,
                )
        target = models[0]
        if self.attention == "data" and (
            target.experts is None or target.experts.count % self.gpus
        ):
            count = "no" if target.experts is None else f"{target.experts.count}"
            raise DflashError(
                f"{self.gpus} GPUs cannot share {count} experts evenly",
                where="--expert-parallel",
                usage=True,
            )


def attention_bytes(model: ModelShape, layout: Layout) -> float:
    """Bytes on one GPU of one layer's q, k, v and o."""
    query = 2 * model.hidden * model.head_dim * model.heads / layout.attention_ways
    key_value = 2 * model.hidden * model.head_dim * model.kv_heads / layout.kv_ways(model)
    return (query + key_value) * FORMATS[model.attention_format].bits / 8


def mlp_bytes(model: ModelShape, layout: Layout) -> float:
    """Bytes on one GPU of one layer's MLP: of all its experts, router included."""
    if model.experts is None:
        weights = model.mlp_weights / layout.attention_ways
    else:
        weights = model.experts.count * model.mlp_weights / layout.gpus
    return weights * FORMATS[model.mlp_format].bits / 8 + 2 * model.router_weights


def vocab_bytes(model: ModelShape, layout: Layout) -> float:
    """Bytes on one GPU of embedding and output head, in bf16."""
    matrices = 1 if model.tied_embeddings else 2
    return 2 * matrices * model.vocab_weights / layout.attention_ways


def target_weight_bytes(model: ModelShape, layout: Layout | None = None) -> float:
    """Bytes of a target's weights on one GPU of `layout`; norms and biases are not counted."""
    layout = layout or Layout()
    layer = attention_bytes(model, layout) + mlp_bytes(model, layout)
    return model.layers * layer + vocab_bytes(model, layout)


def draft_weight_bytes(draft: DraftShape, layout: Layout | None = None) -> float:
    """Bytes of a draft's own weights on one GPU of `layout`: layers and fc (bf16)."""
    layout, model = layout or Layout(), draft.model
    layer = attention_bytes(model, layout) + mlp_bytes(model, layout)
    return model.layers * layer + 2 * draft.fc_weights / layout.attention_ways


def kv_bytes_per_token(model: ModelShape, item_bytes: int = KV_ITEM_BYTES) -> int:
    """Bytes of K and V of every layer for one token of one sequence, windows aside."""
    return 2 * model.layers * model.kv_heads * model.head_dim * item_bytes


def kv_bytes(model: ModelShape, context: float, item_bytes: int = KV_ITEM_BYTES) -> float:
    """Bytes of K and V of one sequence of `context` tokens; a window holds no more than itself."""
    positions = sum(
        context if window is None else min(context, window) for window in model.layer_windows
    )
    return 2 * positions * model.kv_heads * model.head_dim * item_bytes


def dense_draft_context_bytes(
    draft: DraftShape, max_batch: int, max_seq_len: int, item_bytes: int = KV_ITEM_BYTES
) -> int:
    """Bytes of a draft context that is allocated at once, of the whole draft.

    As TensorRT-LLM's VANILLA backend does: [max_batch + 1, layers, max_seq_len + block, kv heads,
    head size] for K and for V, whatever the windows and whatever is really held.
    """
    tokens = (max_batch + 1) * (max_seq_len + draft.block_size)
    return tokens * kv_bytes_per_token(draft.model, item_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFit:
    """Bytes on one GPU of a replica, and the sequences that its memory holds.

    Args:
        context: tokens that each sequence may hold.
        workspace: activations of the widest pass, logits included.
        target_kv, draft_kv: of one sequence at `context`, on one GPU that holds it.
        users: sequences of the whole replica; 0 where the weights leave no room.
    """

    gpu_memory: int
    context: int
    target_weights: float
    draft_weights: float
    workspace: float
    target_kv: float
    draft_kv: float
    users: int

    @property
    def fixed(self) -> float:
        return self.target_weights + self.draft_weights + self.workspace

    @property
    def free(self) -> float:
        """What caches may use; negative where the weights alone do not fit."""
        return self.gpu_memory - self.fixed


def fit_memory(
    gpu: Gpu,
    target: ModelShape,
    draft: DraftShape | None,
    *,
    context: int,
    layout: Layout | None = None,
    rows: int = 1,
    kv_item_bytes: int = KV_ITEM_BYTES,
) -> MemoryFit:
    """How many sequences of `context` tokens fit on each replica of `layout`.

    Caches are paged: a sequence takes what its context needs, the draft's block included.

    Args:
        draft: None for autoregressive decoding.
        rows: tokens per sequence in one pass, the block of a verify step.
    """
    layout = layout or Layout()
    target_kv = kv_bytes(target, context + rows, kv_item_bytes) / layout.kv_ways(target)
    draft_weights = draft_kv = 0.0
    if draft is not None:
        draft_weights = draft_weight_bytes(draft, layout)
        draft_kv = kv_bytes(draft.model, context + rows, kv_item_bytes)
        draft_kv /= layout.kv_ways(draft.model)
    weights = target_weight_bytes(target, layout)
    # Activations: residual, normed copy and the widest projection of each row, and its logits.
    wide = max(target.intermediate * 2, (target.heads + 2 * target.kv_heads) * target.head_dim)
    row = 2 * (2 * target.hidden + wide) + LOGITS_ITEM_BYTES * target.vocab / layout.attention_ways
    sequence = target_kv + draft_kv + rows * row
    free = gpu.memory_bytes - weights - draft_weights - RUNTIME_BYTES
    per_gpu = max(0, int(free // sequence))
    copies = 1 if layout.attention == "tensor" else layout.gpus
    return MemoryFit(
        gpu_memory=gpu.memory_bytes,
        context=context,
        target_weights=weights,
        draft_weights=draft_weights,
        workspace=RUNTIME_BYTES + per_gpu * rows * row,
        target_kv=target_kv,
        draft_kv=draft_kv,
        users=per_gpu * copies,
    )

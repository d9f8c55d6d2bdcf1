"""How many users of a pair GPUs hold, beside its weights and what a pass takes."""

from __future__ import annotations

from dataclasses import dataclass

from dflash_trt.bundle.memory.cache_bytes import KV_ITEM_BYTES, kv_bytes, planned_state_bytes
from dflash_trt.bundle.memory.engine_bytes import RUNTIME_BYTES, row_bytes
from dflash_trt.bundle.memory.gpu_layout import ONE_GPU, GpuLayout
from dflash_trt.bundle.memory.weight_bytes import draft_weight_bytes, target_weight_bytes
from dflash_trt.hardware.gpus import Gpu
from dflash_trt.models.sizes import DraftShape, TargetShape


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFit:
    """Bytes on one GPU of a replica, and the sequences that its memory holds.

    Args:
        context: tokens that each sequence may hold.
        workspace: activations of the widest pass, logits included.
        target_kv, draft_kv: of one sequence at `context`, on one GPU that holds it; the target's
            states count too.
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
    target: TargetShape,
    draft: DraftShape | None,
    *,
    context: int,
    layout: GpuLayout = ONE_GPU,
    rows: int = 1,
    kv_item_bytes: int = KV_ITEM_BYTES,
) -> MemoryFit:
    """How many sequences of `context` tokens fit on each replica of `layout`, in paged caches.

    Args:
        draft: None for autoregressive decoding.
        rows: tokens per sequence in one pass, the block of a verify step.
    """
    target_kv = kv_bytes(target.sizes, context + rows, layout, kv_item_bytes)
    target_kv += planned_state_bytes(target.sizes, layout)
    draft_weights = draft_kv = 0.0
    if draft is not None:
        draft_weights = draft_weight_bytes(draft, layout)
        draft_kv = kv_bytes(draft.sizes, context + rows, layout, kv_item_bytes)
    weights = target_weight_bytes(target, layout)
    row = row_bytes(target, layout.attention_ways)
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

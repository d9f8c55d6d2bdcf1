"""Memory of one GPU under TensorRT-LLM: weights, the draft's context, what is left for KV cache.

TensorRT-LLM reserves the draft's context whole beside the KV cache's pool, which is a share of the
free memory (`free_gpu_memory_fraction`), and the states of recurrent layers of all its sequences.
The share here leaves room for them.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace

from dflash_trt.bundle.memory.cache_bytes import (
    dense_draft_context_bytes,
    deployed_state_bytes,
    kv_bytes,
)
from dflash_trt.bundle.memory.engine_bytes import RUNTIME_BYTES
from dflash_trt.bundle.memory.gpu_layout import GpuLayout
from dflash_trt.bundle.memory.weight_bytes import draft_weight_bytes, target_weight_bytes
from dflash_trt.errors import DflashError
from dflash_trt.hardware.gpus import Gpu
from dflash_trt.models.sizes import DraftShape, TargetShape

CONTEXT_SHARE = 0.7
"""Of what the weights leave: the most that TensorRT-LLM's check lets the draft's context have."""
DEFAULT_FRACTION = 0.9
LEAST_FRACTION = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """Bytes on one GPU.

    Args:
        weights: target's and draft's share.
        draft_context: reserved whole at start.
        states: of recurrent layers, of max_batch sequences.
        fraction: `free_gpu_memory_fraction` that leaves room for it.
        kv_pool: at least so much for the target's KV cache.
        kv_sequence: of a sequence of max_seq_len tokens.
    """

    gpu_memory: int
    weights: int
    draft_context: int
    states: int
    fraction: float
    kv_pool: int
    kv_sequence: int

    @property
    def sequences(self) -> int:
        """Sequences of max_seq_len tokens that the pool holds at once."""
        return self.kv_pool // self.kv_sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentSize:
    """What memory is asked for.

    `kv_item_bytes` is of the target's KV cache; `page_tokens` of the pages that hold the draft's
    context, None where it is not held in pages. Where attention is split by data, `max_batch` is of
    each GPU.
    """

    target: TargetShape
    draft: DraftShape
    gpu: Gpu
    layout: GpuLayout
    kv_item_bytes: int
    page_tokens: int | None
    max_batch: int
    max_seq_len: int
    max_draft_len: int


def draft_context_bytes(size: DeploymentSize) -> int:
    """Bytes of the draft's context on each GPU; the paged backends round up to pages."""
    block, length = size.draft.block_size, size.max_seq_len
    if size.page_tokens is not None:
        length = -(-(length + block) // size.page_tokens) * size.page_tokens - block
    return dense_draft_context_bytes(size.draft, size.max_batch, length, size.layout)


def plan_memory(size: DeploymentSize, where: str) -> MemoryBudget:
    """How the memory of each GPU is used.

    Raises:
        DflashError: weights, draft context and one sequence do not fit; says the bytes, and the
            batch that does; `where` names the profile.
    """
    budget, gpu = _budget(size), size.gpu
    if _fits(budget):
        return budget
    if budget.weights + RUNTIME_BYTES >= budget.gpu_memory:
        raise DflashError(
            f"the weights take {budget.weights:,} bytes a GPU, of {budget.gpu_memory:,} that a "
            f"{gpu.title} has",
            where=where,
            fix="choose a profile with more GPUs",
            usage=True,
        )
    most = bisect_left(
        range(1, size.max_batch + 1),
        True,
        key=lambda batch: not _fits(_budget(replace(size, max_batch=batch))),
    )
    fix = f"pass --max-batch {most} or less, or " if most else ""
    states = f"{budget.states:,} the recurrent states, " if budget.states else ""
    raise DflashError(
        f"the draft context of {size.max_batch} × {size.max_seq_len} tokens takes "
        f"{budget.draft_context:,} bytes a GPU, {states}the weights {budget.weights:,}, and a "
        f"{gpu.title} has {budget.gpu_memory:,}, which leaves too little for the KV cache",
        where=where,
        fix=f"{fix}lower --max-seq-len",
        usage=True,
    )


def _budget(size: DeploymentSize) -> MemoryBudget:
    layout, gpu = size.layout, size.gpu
    weights = int(target_weight_bytes(size.target, layout) + draft_weight_bytes(size.draft, layout))
    free = max(1, gpu.memory_bytes - weights - RUNTIME_BYTES)
    context = draft_context_bytes(size)
    sequence = deployed_state_bytes(size.target.sizes, size.max_draft_len, layout)
    states = int(size.max_batch * sequence)
    share = min(DEFAULT_FRACTION, 1 - (context / CONTEXT_SHARE + states) / free)
    fraction = max(0.0, int(share * 100) / 100)
    return MemoryBudget(
        gpu_memory=gpu.memory_bytes,
        weights=weights,
        draft_context=context,
        states=states,
        fraction=fraction,
        kv_pool=max(0, int(fraction * (free - context - states))),
        kv_sequence=int(kv_bytes(size.target.sizes, size.max_seq_len, layout, size.kv_item_bytes)),
    )


def _fits(budget: MemoryBudget) -> bool:
    return budget.fraction >= LEAST_FRACTION and budget.sequences >= 1

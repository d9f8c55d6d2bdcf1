"""What a pair takes of each GPU that TensorRT-LLM serves it on: a plan's users, a deployment's.

TensorRT-LLM reserves the draft's context whole beside the KV cache's pool, which is a share of the
free memory (`free_gpu_memory_fraction`), and the states of recurrent layers of all its sequences.
The share here leaves room for them.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from dflash_trt.bundle.memory.cache_bytes import (
    KV_ITEM_BYTES,
    dense_draft_context_bytes,
    deployed_state_bytes,
    kv_bytes,
    planned_state_bytes,
)
from dflash_trt.bundle.memory.gpu_layout import ONE_GPU, GpuLayout
from dflash_trt.bundle.memory.memory import LOGITS_ITEM_BYTES, RUNTIME_BYTES, Memory
from dflash_trt.bundle.memory.weight_bytes import draft_weight_bytes, target_weight_bytes
from dflash_trt.errors import DflashError
from dflash_trt.hardware.gpus import Gpu
from dflash_trt.models.sizes import DraftShape, TargetShape

CONTEXT_SHARE = 0.7
"""Of what the weights leave: the most that TensorRT-LLM's check lets the draft's context have."""
DEFAULT_FRACTION = 0.9
LEAST_FRACTION = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedMemory(Memory):
    """Memory of one GPU of a replica, and the sequences that it holds.

    Args:
        gpu_memory: bytes that it has.
        target_kv, draft_kv: of one sequence; a plan counts the target's states too, and a
            deployment reserves the draft's whole.
        users: such sequences at once; a plan's are of the whole replica.
        fraction: `free_gpu_memory_fraction` that leaves room for the rest; 0 where none does.
    """

    gpu_memory: int
    target_kv: float
    draft_kv: float
    users: int
    fraction: float = 0.0

    @property
    def free(self) -> float:
        """What caches may use; negative where the weights alone do not fit."""
        return self.gpu_memory - self.weights - self.workspace


def fit_memory(
    gpu: Gpu,
    target: TargetShape,
    draft: DraftShape | None,
    *,
    context: int,
    layout: GpuLayout = ONE_GPU,
    rows: int = 1,
    kv_item_bytes: int = KV_ITEM_BYTES,
) -> ServedMemory:
    """How many sequences of `context` tokens fit on each replica of `layout`, in paged caches.

    Args:
        draft: None for autoregressive decoding.
        rows: tokens per sequence in one pass, the block of a verify step.
    """
    state = planned_state_bytes(target.sizes, layout)
    cache = kv_bytes(target.sizes, context + rows, layout, kv_item_bytes)
    draft_weights = draft_cache = 0.0
    if draft is not None:
        draft_weights = draft_weight_bytes(draft, layout)
        draft_cache = kv_bytes(draft.sizes, context + rows, layout, kv_item_bytes)
    weights = target_weight_bytes(target, layout)
    row = row_bytes(target, layout.attention_ways)
    free = gpu.memory_bytes - weights - draft_weights - RUNTIME_BYTES
    users = max(0, int(free // (cache + state + draft_cache + rows * row)))
    return ServedMemory(
        gpu_memory=gpu.memory_bytes,
        target_weights=weights,
        draft_weights=draft_weights,
        target_cache=users * cache,
        draft_cache=users * draft_cache,
        states=users * state,
        workspace=RUNTIME_BYTES + users * rows * row,
        target_kv=cache + state,
        draft_kv=draft_cache,
        users=users * (1 if layout.attention == "tensor" else layout.gpus),
    )


def row_bytes(target: TargetShape, vocab_ways: int) -> float:
    """Activations of one row: residual, normed copy, widest projection (bf16), and its logits."""
    sizes = target.sizes
    wide = max(2 * sizes.mlp_size, *(layer.projection_elements for layer in sizes.kinds))
    return 2 * (2 * sizes.hidden_size + wide) + LOGITS_ITEM_BYTES * target.vocab_size / vocab_ways


def plan_memory(
    target: TargetShape,
    draft: DraftShape,
    gpu: Gpu,
    layout: GpuLayout,
    *,
    kv_item_bytes: int,
    page_tokens: int | None,
    max_batch: int,
    max_seq_len: int,
    max_draft_len: int,
    where: str,
) -> ServedMemory:
    """How a deployment uses the memory of each GPU: its KV cache is what is left.

    Args:
        kv_item_bytes: of the target's KV cache.
        page_tokens: of the pages that hold the draft's context; None where they do not.
        max_batch: of each GPU where attention is split by data.
        where: names the profile in an error.

    Raises:
        DflashError: weights, draft context and one sequence do not fit; says the bytes, and the
            batch that does.
    """
    length = max_seq_len
    if page_tokens is not None:  # the paged backends round up to pages
        block = draft.block_size
        length = -(-(length + block) // page_tokens) * page_tokens - block
    plain = fit_memory(gpu, target, draft, context=max_seq_len, layout=layout)
    state = deployed_state_bytes(target.sizes, max_draft_len, layout)
    cached = [target.sizes, draft.sizes] if draft.fuses_token else [target.sizes]
    sequence = sum(int(kv_bytes(one, max_seq_len, layout, kv_item_bytes)) for one in cached)
    free = max(1, gpu.memory_bytes - int(plain.weights) - RUNTIME_BYTES)

    def count(batch: int) -> ServedMemory:
        context = 0  # an MTP layer's keys and values are in the target's cache
        if not draft.fuses_token:
            context = dense_draft_context_bytes(draft, batch, length, layout)
        states = int(batch * state)
        share = min(DEFAULT_FRACTION, 1 - (context / CONTEXT_SHARE + states) / free)
        fraction = max(0.0, int(share * 100) / 100)
        pool = max(0, int(fraction * (free - context - states)))
        return ServedMemory(
            gpu_memory=gpu.memory_bytes,
            target_weights=plain.target_weights,
            draft_weights=plain.draft_weights,
            target_cache=pool,
            draft_cache=context,
            states=states,
            workspace=RUNTIME_BYTES,
            target_kv=sequence,
            draft_kv=0,
            users=pool // sequence,
            fraction=fraction,
        )

    def fits(one: ServedMemory) -> bool:
        return one.fraction >= LEAST_FRACTION and one.users >= 1

    took = count(max_batch)
    if fits(took):
        return took
    weights = int(took.weights)
    if weights + RUNTIME_BYTES >= gpu.memory_bytes:
        raise DflashError(
            f"the weights take {weights:,} bytes a GPU, of {gpu.memory_bytes:,} that a "
            f"{gpu.title} has",
            where=where,
            fix="choose a profile with more GPUs",
            usage=True,
        )
    batches = range(1, max_batch + 1)
    most = bisect_left(batches, True, key=lambda batch: not fits(count(batch)))
    fix = f"pass --max-batch {most} or less, or " if most else ""
    states = f"{took.states:,} the recurrent states, " if took.states else ""
    raise DflashError(
        f"the draft context of {max_batch} × {max_seq_len} tokens takes {took.draft_cache:,} bytes "
        f"a GPU, {states}the weights {weights:,}, and a {gpu.title} has {gpu.memory_bytes:,}, "
        "which leaves too little for the KV cache",
        where=where,
        fix=f"{fix}lower --max-seq-len",
        usage=True,
    )

"""Calls that probes make of an executor, below the generator."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dflash_trt.backends.base import (
    Executor,
    FloatArray,
    Int64Array,
    Scores,
    StepCall,
    TargetCall,
    TargetGraph,
    hold_positions,
)
from dflash_trt.runtime import SamplingParams
from dflash_trt.runtime.scores import sampling_input


def begin_anew(*executors: Executor) -> None:
    """Empties all slots; where caches are paged, each slot gets pages for a full sequence."""
    for executor in executors:
        executor.release_slots(0)
        hold_positions(executor, executor.limits.max_seq_len, executor.limits.max_batch)


def forward(
    executor: Executor,
    ids: Int64Array,
    starts: Sequence[int],
    slot: int,
    rows: int = 1,
    graph: TargetGraph = "target",
) -> FloatArray:
    """Logits [B,rows,V] of the last `rows` rows of ids [B,S], in the slots from `slot` on."""
    picked = np.tile(np.arange(ids.shape[1] - rows, ids.shape[1]), (len(ids), 1))
    sampling = greedy(executor, len(ids))
    call = TargetCall(graph, slot, ids, np.array(starts), picked, Scores.LOGITS, sampling)
    output = executor.forward(call)
    assert output.logits is not None
    return output.logits.copy()


def make_step(executor: Executor, anchors: Int64Array, starts: Int64Array) -> StepCall:
    """A greedy step of the largest block, in the slots from 0 on."""
    block, sampling = executor.limits.block_size, greedy(executor, len(anchors))
    return StepCall(0, anchors, starts, block, sampling=sampling)


def greedy(executor: Executor, batch: int) -> Int64Array | None:
    """The sampling of `batch` greedy sequences."""
    return sampling_input(executor.limits, [SamplingParams()] * batch)


def random_ids(vocab_size: int, batch: int, rows: int) -> Int64Array:
    """The same [batch,rows] at every call."""
    return np.random.default_rng(1).integers(0, vocab_size, (batch, rows))

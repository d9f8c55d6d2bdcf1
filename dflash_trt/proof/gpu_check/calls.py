"""What probes of a pair's engines are given, and the calls they make below the generator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
from dflash_trt.backends.onnxruntime.executor import OnnxRuntimeExecutor
from dflash_trt.backends.tensorrt.run.executor import TensorRtExecutor
from dflash_trt.bundle.manifest import Manifest
from dflash_trt.decoding import Request, SamplingParams
from dflash_trt.decoding.scores import sampling_input


@dataclass(frozen=True, slots=True)
class Bench:
    """A pair's engines beside its graphs on the CPU.

    Args:
        manifest: of the engines.
        requests: what is generated.
        prompt: [1,S], longer than a block and so short that a block has room behind it.
    """

    gpu: TensorRtExecutor
    cpu: OnnxRuntimeExecutor
    manifest: Manifest
    requests: Sequence[Request]
    prompt: Int64Array


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
    sampling = _greedy(executor, len(ids))
    call = TargetCall(graph, slot, ids, np.array(starts), picked, Scores.LOGITS, sampling)
    output = executor.forward(call)
    assert output.logits is not None
    return output.logits.copy()


def make_step(executor: Executor, anchors: Int64Array, starts: Int64Array) -> StepCall:
    """A greedy step of the largest block, in the slots from 0 on."""
    block, sampling = executor.limits.block_size, _greedy(executor, len(anchors))
    return StepCall(0, anchors, starts, block, sampling=sampling)


def _greedy(executor: Executor, batch: int) -> Int64Array | None:
    return sampling_input(executor.limits, [SamplingParams()] * batch)


def random_ids(vocab_size: int, batch: int, rows: int) -> Int64Array:
    """The same [batch,rows] at every call."""
    return np.random.default_rng(1).integers(0, vocab_size, (batch, rows))

"""Sequences that decode together, and random traffic, on an executor whose engines draw."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from dflash_trt.backends.base import (
    ExecutorLimits,
    Int64Array,
    Scores,
    SpeculationOutput,
    StepCall,
)
from dflash_trt.backends.device.executor import DeviceExecutor
from dflash_trt.decoding import Generator, Request, RequestResult, SamplingParams
from dflash_trt.graph.bindings import GRAPH_NAMES
from dflash_trt.graph.form import GraphForm
from dflash_trt.sampling.acceptance import accept_block
from dflash_trt.sampling.params import pack_sampling
from tests.backends.steps import one_chunk
from tests.graph.runner import build
from tests.pairs import TinyPair

GREEDY = SamplingParams()
SAMPLED = SamplingParams(temperature=0.8, top_k=30, seed=2**63 + 5)
PROMPTS = ((3, 1, 4, 1, 5, 9, 2, 6), (2, 7, 1, 8, 2, 8))
# Every seventh id ends an output: some do in the middle of a block.
ENDS = range(0, 256, 7)


def write_graphs(built: TinyPair, folder: Path, form: GraphForm) -> Path:
    """A pair's graphs in another form, beside its weights, in `folder`."""
    shutil.copytree(built.bundle.folder, folder, copy_function=os.link)
    for name in GRAPH_NAMES:
        path = folder / f"{name}.onnx"
        path.unlink()
        path.write_bytes(build(built, name, form).SerializeToString())
    return folder


class Patient:
    """An executor whose callers never expect to go on."""

    def __init__(self, executor: DeviceExecutor) -> None:
        self._executor = executor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def speculate(self, call: StepCall) -> SpeculationOutput:
        return self._executor.speculate(replace(call, ahead=False))


@dataclass
class Decoding:
    """Sequences that decode together in the slots from `first_slot` on."""

    executor: DeviceExecutor
    sampling: Int64Array
    anchors: Int64Array
    starts: Int64Array
    first_slot: int = 0

    @classmethod
    def begin(
        cls,
        executor: DeviceExecutor,
        *params: SamplingParams,
        prompts: Sequence[Sequence[int]] = PROMPTS,
        first_slot: int = 0,
    ) -> Decoding:
        """Prefills a prompt for each of `params`, in the slots from `first_slot` on."""
        sampling, anchors = pack_sampling(params), []
        prompts = prompts[: len(params)]
        for index, prompt in enumerate(prompts):
            slot, own, last = first_slot + index, sampling[index : index + 1], len(prompt) - 1
            call = one_chunk(np.array([prompt]), last, slot=slot, sampling=own)
            anchors.append(executor.forward(call).choice_ids[0, 0])
        starts = np.array([*map(len, prompts)])
        return cls(executor, sampling, np.array(anchors), starts, first_slot)

    def call(
        self, *, ahead: bool = False, scores: Scores = Scores.NONE, rows: int | None = None
    ) -> SpeculationOutput:
        rows = rows or self.executor.limits.block_size
        return self.executor.speculate(
            StepCall(self.first_slot, self.anchors, self.starts, rows, scores, self.sampling, ahead)
        )

    def step(self, *, ahead: bool) -> list[list[int]]:
        """One step; the tokens that it settled, by sequence."""
        return self.settle(self.call(ahead=ahead))

    def settle(self, output: SpeculationOutput) -> list[list[int]]:
        """Goes on behind a step's tokens."""
        settled = [
            accept_block(ids[1:].tolist(), own.tolist().__getitem__)
            for ids, own in zip(output.token_ids, output.choice_ids, strict=True)
        ]
        self.anchors = np.array([tokens[-1] for tokens in settled])
        self.starts = self.starts + np.array([len(tokens) for tokens in settled])
        return settled


MakeRequest = Callable[[random.Random, ExecutorLimits], Request]


@dataclass
class Traffic:
    """What was asked for, and what came of it: all events in order, and results by request."""

    requests: dict[int, Request] = field(default_factory=dict)
    events: list[tuple[int, tuple[int, ...], str | None]] = field(default_factory=list)
    results: dict[int, RequestResult] = field(default_factory=dict)


def play(
    executor: Any,
    seed: int,
    *,
    turns: int = 120,
    make: MakeRequest,
) -> Traffic:
    """Requests that come, end and are cancelled as `seed` has it, for `turns` steps."""
    rng, limits = random.Random(seed), executor.limits
    engine = Generator(executor, eos_token_ids=ENDS)
    traffic, live = Traffic(), set()
    rate = rng.choice([0.05, 0.5])
    for turn in range(turns):
        if turn < turns * 2 // 3 and (turn == 0 or rng.random() < rate):
            request = make(rng, limits)
            number = engine.submit(request)
            live.add(number)
            traffic.requests[number] = request
        if live and rng.random() < 0.04:
            engine.cancel(rng.choice(sorted(live)))
        for event in engine.step():
            reason = None if event.result is None else event.result.finish_reason
            traffic.events.append((event.request_id, event.token_ids, reason))
            if event.result is not None:
                live.discard(event.request_id)
                traffic.results[event.request_id] = event.result
    for number in sorted(live):
        engine.cancel(number)
    return traffic

"""Sequences that decode together on an executor whose engines draw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dflash_trt.executors.base import Int64Array, Scores, SpeculationOutput
from dflash_trt.executors.tensorrt import TensorRtExecutor
from dflash_trt.runtime import SamplingParams
from dflash_trt.runtime.acceptance import accept_block
from dflash_trt.runtime.sampling import pack_sampling

ROWS = 6
GREEDY = SamplingParams()
SAMPLED = SamplingParams(temperature=0.8, top_k=30, seed=2**63 + 5)
PROMPTS = ((3, 1, 4, 1, 5, 9, 2, 6), (2, 7, 1, 8, 2, 8))


class Patient:
    """An executor whose callers never expect to go on."""

    def __init__(self, executor: TensorRtExecutor) -> None:
        self._executor = executor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def speculate(self, *arguments: Any) -> SpeculationOutput:
        *same, ahead = arguments
        assert isinstance(ahead, bool)
        return self._executor.speculate(*same, False)


@dataclass
class Decoding:
    """Sequences that decode together in the slots from `first_slot` on."""

    executor: TensorRtExecutor
    sampling: Int64Array
    anchors: Int64Array
    starts: Int64Array
    first_slot: int = 0

    @classmethod
    def begin(
        cls,
        executor: TensorRtExecutor,
        *params: SamplingParams,
        prompts: Sequence[Sequence[int]] = PROMPTS,
    ) -> Decoding:
        """Prefills a prompt for each of `params`."""
        sampling, anchors = pack_sampling(params), []
        prompts = prompts[: len(params)]
        for slot, prompt in enumerate(prompts):
            output = executor.forward(
                "target",
                slot,
                np.array([prompt]),
                np.array([0]),
                np.array([[len(prompt) - 1]]),
                Scores.NONE,
                sampling[slot : slot + 1],
            )
            anchors.append(output.choice_ids[0, 0])
        return cls(executor, sampling, np.array(anchors), np.array([*map(len, prompts)]))

    def call(self, *, ahead: bool = False, scores: Scores = Scores.NONE) -> SpeculationOutput:
        return self.executor.speculate(
            self.first_slot, self.anchors, self.starts, ROWS, scores, self.sampling, ahead
        )

    def step(self, *, ahead: bool) -> list[list[int]]:
        """One step; the tokens that it settled, by sequence."""
        output = self.call(ahead=ahead)
        settled = [
            accept_block(ids[1:].tolist(), own.tolist().__getitem__)
            for ids, own in zip(output.token_ids, output.choice_ids, strict=True)
        ]
        self.anchors = np.array([tokens[-1] for tokens in settled])
        self.starts = self.starts + np.array([len(tokens) for tokens in settled])
        return settled

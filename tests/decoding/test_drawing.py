"""The generator over an executor that draws: its choices are final, told what comes next."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dflash_trt.backends.base import Scores, SpeculationOutput, StepCall, TargetCall, TargetOutput
from dflash_trt.decoding import (
    Generator,
    Penalties,
    Request,
    RequestFailedError,
    SamplingParams,
)
from dflash_trt.sampling.token_rules import TokenRules
from tests.decoding.reference import Steps, assert_plain
from tests.standins.executor import FakeExecutor

SAMPLINGS = (
    SamplingParams(),
    SamplingParams(temperature=1.0, seed=2**64 - 1),
    SamplingParams(temperature=0.7, top_k=4, top_p=0.9, seed=3),
    SamplingParams(temperature=1.3, top_p=0.5, seed=4),
)


class DrawingExecutor(FakeExecutor):
    """Remembers the scores it is asked for, and whether it may go on after a step, and how."""

    def __init__(self, **options: int) -> None:
        super().__init__(draws=True, **options)  # type: ignore[arg-type]
        self.scores: set[Scores] = set()
        self.hints: list[bool] = []
        self.kept: list[bool] = []
        self._expected: dict[int, tuple[list[int], list[int], int]] = {}

    def forward(self, call: TargetCall) -> TargetOutput:
        self.scores.add(call.scores)
        self._settle(call, None)
        return super().forward(call)

    def speculate(self, call: StepCall) -> SpeculationOutput:
        self.scores.add(call.scores)
        self.hints.append(call.ahead)
        rows = call.rows
        self._settle(call, (call.anchors.tolist(), call.starts.tolist(), rows))
        output = super().speculate(call)
        if call.ahead:
            accepted = [
                next((i for i, token in enumerate(ids[1:]) if token != own[i]), rows - 1)
                for ids, own in zip(output.token_ids, output.choice_ids, strict=True)
            ]
            anchors = np.take_along_axis(output.choice_ids, np.array(accepted)[:, None], axis=1)
            starts = call.starts + np.array(accepted) + 1
            self._expected[call.first_slot] = anchors[:, 0].tolist(), starts.tolist(), rows
        return output

    def _settle(
        self, call: TargetCall | StepCall, asked: tuple[list[int], list[int], int] | None
    ) -> None:
        """Calls of other slots pass a step by that was begun ahead."""
        for slot, expected in list(self._expected.items()):
            if slot < call.slots.stop and call.first_slot < slot + len(expected[0]):
                self.kept.append(slot == call.first_slot and asked == expected)
                del self._expected[slot]


@pytest.mark.parametrize("sampling", SAMPLINGS[:2])
def test_rows_that_are_not_finite_fail_their_request_alone(sampling: SamplingParams) -> None:
    class Broken(DrawingExecutor):
        def _run(self, call: TargetCall | StepCall, *rest: Any, **options: Any) -> np.ndarray:
            logits = super()._run(call, *rest, **options)
            positions = call.starts[:, None] + np.arange(call.rows)
            sick = self._cached[: len(logits), :1] == 7
            logits[(positions >= 12) & sick] = np.nan
            return logits

    executor = Broken()
    generator = Generator(executor)
    well, sick = (
        generator.submit(Request(prompt_ids=(first, 2), max_tokens=30, sampling=sampling))
        for first in (5, 7)
    )
    steps = Steps(generator, executor)
    with pytest.raises(RequestFailedError, match="logits for position 13 are not fin") as caught:
        steps.finish()
    assert caught.value.request_id == sick
    generator.cancel(sick)
    request = Request(prompt_ids=(5, 2), max_tokens=30, sampling=sampling)
    assert_plain(steps.finish()[well], request, executor)


def test_a_step_goes_on_until_a_request_ends_or_comes() -> None:
    """Four slots: as long as nothing else is known, the next step is the one announced."""
    executor = DrawingExecutor(max_seq_len=256)
    generator = Generator(executor)
    generator.submit(Request(prompt_ids=(1, 2), max_tokens=60))
    generator.step()
    for _ in range(3):
        generator.step()
    assert executor.hints == [True] * 3 and executor.kept == [True] * 2
    generator.submit(Request(prompt_ids=(3,), max_tokens=60))  # prefills after the next step
    generator.step()
    assert executor.hints[3:] == [False] and executor.kept == [True] * 3
    for _ in range(2):
        generator.step()
    assert executor.hints[4:] == [True] * 2
    # A block of its own: two passes a step, each of which goes on.
    generator.submit(Request(prompt_ids=(4,), max_tokens=60, block_size=3))
    generator.step()
    before = len(executor.hints), len(executor.kept)
    for _ in range(3):
        generator.step()
    assert executor.hints[before[0] :] == [True] * 6
    assert executor.kept[before[1] :] == [True] * 4


ALONE: dict[str, dict[str, Any]] = {
    "penalties": {"penalties": Penalties(frequency=0.7, repetition=1.3, bias=((5, 3.0),))},
    "rules": {"rules": TokenRules(bad=((3,), (5, 5)))},
    "min_p": {"sampling": SamplingParams(temperature=1.0, min_p=0.2, seed=4)},
    "logprobs": {"logprobs": 2},
}


@pytest.mark.parametrize("name", ALONE)
def test_what_the_graph_cannot_choose_the_host_chooses(name: str) -> None:
    """For that request alone: those beside it go on ahead, and all answers are the host's."""
    drawn = SamplingParams(temperature=0.9, seed=2)
    requests = [
        Request(prompt_ids=(1, 2), max_tokens=40, sampling=drawn),
        Request(prompt_ids=(3,), max_tokens=40, **{"sampling": drawn, **ALONE[name]}),
        Request(prompt_ids=(4, 4), max_tokens=40),
    ]
    executor = DrawingExecutor(max_batch=3, max_seq_len=256)
    results = Generator(executor).generate(requests)
    expected = Generator(FakeExecutor(max_seq_len=256)).generate(requests)
    assert [one.token_ids for one in results] == [one.token_ids for one in expected]
    assert [one.logprobs for one in results] == [one.logprobs for one in expected]
    free = Generator(DrawingExecutor(max_seq_len=256)).generate(
        [
            replace(requests[1], **{key: getattr(Request(prompt_ids=(1,)), key)})
            for key in ALONE[name]
        ]
    )
    assert name == "logprobs" or free[0].token_ids != results[1].token_ids
    assert executor.scores == {Scores.NONE, Scores.LOGITS}
    assert sum(executor.kept) > len(executor.kept) / 2 and executor.hints.count(True) > 8

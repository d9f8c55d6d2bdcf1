"""Drawing from an executor's candidates is drawing from its logits, ties included."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_trt.backends.base import (
    Candidates,
    FloatArray,
    Int64Array,
    Scores,
    SpeculationOutput,
    StepCall,
    TargetCall,
    TargetOutput,
)
from dflash_trt.decoding import Generator, GeneratorOptions, Request, SamplingParams, choose_tokens
from dflash_trt.decoding.scores import MAX_CANDIDATE_TOP_K
from dflash_trt.errors import DflashError
from dflash_trt.sampling.choice import choose_candidate
from tests.sampling.candidates import pick_candidates
from tests.standins.executor import FakeExecutor

VOCAB = 40
KEPT = 12


class CandidateExecutor(FakeExecutor):
    """Answers with candidates where they are enough; logits are coarse, so that many tie."""

    def __init__(self, *, step: float, hides: bool = True) -> None:
        super().__init__(vocab_size=VOCAB)
        self._step, self._hides = step, hides
        self.asked: list[Scores] = []
        self.whole_rows = 0

    def forward(self, call: TargetCall) -> TargetOutput:
        output = super().forward(replace(call, scores=Scores.LOGITS))
        return TargetOutput(*self._answer(output, call.scores))

    def speculate(self, call: StepCall) -> SpeculationOutput:
        output = super().speculate(replace(call, scores=Scores.LOGITS))
        return SpeculationOutput(output.token_ids, *self._answer(output, call.scores))

    def _answer(
        self, output: TargetOutput | SpeculationOutput, scores: Scores
    ) -> tuple[Int64Array, FloatArray | None, Candidates | None]:
        self.asked.append(scores)
        assert output.logits is not None
        logits = np.round(output.logits / self._step).astype(np.float32) * np.float32(self._step)
        choices = logits.argmax(-1)
        if scores is Scores.NONE:
            return choices, None, None
        if scores is Scores.LOGITS or not self._hides:
            return choices, logits, None

        def read_row(sequence: int, row: int) -> FloatArray:
            self.whole_rows += 1
            return logits[sequence, row]

        ids = pick_candidates(logits, KEPT, len(self.calls))
        values = np.take_along_axis(logits, ids, axis=-1)
        return choices, None, Candidates(ids, values, read_row)


@pytest.mark.parametrize("speculation", [True, False])
@pytest.mark.parametrize("step", [0.5, 1e-6])
def test_outputs_do_not_depend_on_what_the_executor_hands_out(
    step: float, speculation: bool
) -> None:
    requests = [
        Request(prompt_ids=(3, 1, 4), max_tokens=30, sampling=sampling)
        for sampling in (
            SamplingParams(temperature=1.0, top_k=5, seed=1),
            SamplingParams(temperature=0.7, top_k=8, top_p=0.8, seed=2),
            SamplingParams(),
            SamplingParams(temperature=1.5, top_k=KEPT, seed=3),
        )
    ]
    outputs, whole_rows = [], 0
    for hides in (True, False):
        executor = CandidateExecutor(step=step, hides=hides)
        generator = Generator(executor, options=GeneratorOptions(speculation=speculation))
        outputs.append([result.token_ids for result in generator.generate(requests)])
        assert Scores.CANDIDATES in executor.asked
        whole_rows += executor.whole_rows
    assert outputs[0] == outputs[1]
    assert whole_rows > 0, "top-k of all candidates has to ask"


def test_one_request_that_needs_whole_rows_gets_them_for_its_batch() -> None:
    executor = CandidateExecutor(step=0.5)
    requests = [
        Request(prompt_ids=(1, 2), max_tokens=8, sampling=sampling, ignore_eos=True)
        for sampling in (
            SamplingParams(temperature=1.0, top_k=3),
            SamplingParams(temperature=1.0, top_k=MAX_CANDIDATE_TOP_K + 1),
        )
    ]
    Generator(executor).generate(requests)
    assert set(executor.asked) == {Scores.LOGITS, Scores.CANDIDATES}


@given(
    levels=st.lists(st.integers(0, 6), min_size=VOCAB, max_size=VOCAB),
    top_k=st.integers(1, KEPT - 1),
    top_p=st.sampled_from([0.1, 0.5, 0.9, 1.0]),
    seed=st.integers(0, 50),
)
def test_candidates_choose_what_the_row_chooses_or_nothing(
    levels: list[int], top_k: int, top_p: float, seed: int
) -> None:
    logits = np.array(levels, np.float32) / 4
    sampling = SamplingParams(temperature=0.8, top_k=top_k, top_p=top_p, seed=seed)
    ids = pick_candidates(logits, KEPT, seed)
    chosen = choose_candidate(ids, logits[ids], 7, sampling)
    (expected,) = choose_tokens(logits[None], np.array([7]), sampling)
    ranked = np.sort(logits)[::-1]
    if ranked[top_k - 1] > ranked[KEPT - 1]:
        assert chosen == expected
    else:
        assert chosen is None


def test_candidates_that_are_no_numbers_are_an_error() -> None:
    logits = np.array([1.0, np.nan, 0.5], np.float32)
    with pytest.raises(DflashError, match="logits for position 9 are not finite"):
        choose_candidate(np.arange(3), logits, 9, SamplingParams(temperature=1.0, top_k=1))

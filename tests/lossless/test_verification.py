"""`verify` itself: it finds a single flipped bit, and it knows a tie from a defect."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from dflash_trt.backends.base import FloatArray, Int64Array, StepCall, TargetCall
from dflash_trt.decoding import Request, RequestResult, RequestStatistics
from dflash_trt.proof.verification import Mode, ModeReport, verify
from tests.standins.executor import FakeExecutor

PROMPTS = ((1, 2, 3), (4, 5), (6, 7, 8, 9))
MODES = (
    Mode(speculation=False, batch=3, block_size=None),
    Mode(speculation=True, batch=1, block_size=5),
    Mode(speculation=True, batch=3, block_size=5),
)


class Doctored(FakeExecutor):
    """A fake executor whose speculative logits pass through `change` first."""

    change: Callable[[FloatArray], None]
    bitwise = True

    @property
    def is_bitwise(self) -> bool:
        return self.bitwise

    def _hand_out(
        self, logits: FloatArray, call: TargetCall | StepCall, positions: Int64Array
    ) -> tuple[Int64Array, FloatArray | None]:
        if isinstance(call, StepCall):
            self.change(logits)
        return super()._hand_out(logits, call, positions)


def run(change: Callable[[FloatArray], None], *, bitwise: bool = True) -> list[ModeReport]:
    executor = Doctored()
    executor.change = change
    executor.bitwise = bitwise
    requests = [Request(prompt_ids=prompt, max_tokens=40) for prompt in PROMPTS]
    return verify(executor, requests, MODES)


def test_equal_runs_are_lossless_in_every_mode() -> None:
    reports = run(lambda logits: None)
    assert [report.mode for report in reports] == [str(mode) for mode in MODES]
    assert all(report.is_lossless and report.difference is None for report in reports)
    assert all(report.tokens == 3 * 40 for report in reports)
    assert reports[1].statistics.acceptance_length is not None
    assert reports[0].statistics.acceptance_length is None


def test_one_flipped_bit_of_one_logit_is_found() -> None:
    flipped: list[float] = []

    def flip(logits: FloatArray) -> None:
        if not flipped:
            bits = logits[0, 0, 3:4].view(np.uint32)
            bits ^= 1
            flipped.append(float(logits[0, 0, 3]))

    _, alone, batched = run(flip)
    assert not alone.is_lossless and batched.is_lossless
    assert alone.difference is not None
    assert (alone.difference.prompt, alone.difference.position) == (0, 1)
    assert alone.difference.vocabulary_id == 3
    assert alone.difference.actual_logit == flipped[0]
    assert "prompt 0, output token 1: logit 3" in str(alone.difference)
    assert not alone.ties


def make_result(logits: list[list[float]]) -> RequestResult:
    rows = np.array(logits, np.float32)
    return RequestResult(
        request_id=0,
        token_ids=tuple(rows.argmax(axis=1).tolist()),
        text=None,
        finish_reason="length",
        statistics=RequestStatistics(prompt_tokens=1, output_tokens=len(logits)),
        logits=rows,
    )


@pytest.mark.parametrize(("gap", "is_tie"), [(0.0005, True), (0.002, False)])
def test_a_parting_is_a_tie_only_below_the_noise_of_the_rows_before(
    gap: float, is_tie: bool
) -> None:
    """Row 0 shows noise of 1e-3; in row 1 the two best change places across `gap`."""
    expected = make_result([[3.0, 1.0, 0.0], [2.0, 2.0 - gap, 0.0], [9.0, 0.0, 0.0]])
    actual = make_result([[3.001, 1.0, 0.0], [2.0, 2.0 + gap, 0.0], [0.0, 9.0, 0.0]])
    report = ModeReport(mode="any", is_bitwise=False)
    report.add(0, expected, actual)
    assert report.noise == pytest.approx(1e-3, rel=1e-3)
    (tie,) = report.ties
    assert (tie.position, tie.expected_token, tie.actual_token) == (1, 0, 1)
    assert tie.gap == pytest.approx(gap, rel=1e-2)
    assert report.is_lossless is is_tie
    report.is_bitwise = True
    assert not report.is_lossless


def test_a_batch_is_full_even_with_fewer_prompts() -> None:
    """One prompt must not pass for a batch of three that never ran."""
    executor = FakeExecutor()
    heard: list[int] = []
    request = Request(prompt_ids=PROMPTS[0], max_tokens=20)
    (report,) = verify(executor, [request], [MODES[2]], on_tokens=heard.append)
    assert max(call.sequences for call in executor.calls) == 3
    assert report.tokens == 20 and report.is_lossless
    assert sum(heard) == 2 * 20, "the baseline's and the mode's, not the repeats'"

"""Statistics against examples worked by hand."""

from __future__ import annotations

import json

import pytest

from dflash_trt.decoding import RequestStatistics, total
from dflash_trt.decoding.statistics import StatisticsRecorder


def record_example() -> RequestStatistics:
    """Block 4, n = 8: the prefill's token, then three steps.

    | step | accepted | settled | emitted | what happened |
    |---|---|---|---|---|
    | 1 | 3 | 4 | 4 | the whole block and the bonus |
    | 2 | 0 | 1 | 1 | the first draft was wrong |
    | 3 | 2 | 3 | 2 | a stop token was the second draft |
    """
    recorder = StatisticsRecorder(submitted_at=10.0, first_token_at=10.5)
    recorder.record_step(rows=4, verified=4, emitted=4)
    recorder.record_step(rows=4, verified=1, emitted=1)
    recorder.record_step(rows=4, verified=3, emitted=2)
    recorder.finished_at = 12.25
    return recorder.freeze(prompt_tokens=5, output_tokens=8)


def test_worked_example() -> None:
    statistics = record_example()
    assert statistics.to_json() == {
        "prompt_tokens": 5,
        "cached_prompt_tokens": None,
        "output_tokens": 8,
        "preemptions": None,
        "steps": 3,
        "drafted_tokens": 9,
        "accepted_tokens": 5,
        "acceptance_length": pytest.approx(7 / 3),
        "acceptance_rate": pytest.approx(5 / 9),
        "acceptance_histogram": [1, 1, 0, 1],
        "conditional_acceptance": [pytest.approx(2 / 3), 1.0, 1.0],
        "time_to_first_token_s": 0.5,
        "time_per_output_token_s": 0.25,
        "tokens_per_second": 4.0,
        "end_to_end_s": 2.25,
    }
    assert (statistics.position_trials, statistics.position_accepts) == ((3, 2, 1), (2, 2, 1))


def test_totals() -> None:
    recorder = StatisticsRecorder(
        submitted_at=0.0, first_token_at=1.5, cached_prompt_tokens=4, preemptions=3
    )
    recorder.record_step(rows=2, verified=2, emitted=2)
    recorder.finished_at = 2.5
    other = recorder.freeze(prompt_tokens=1, output_tokens=3)
    assert total([record_example(), other], wall_s=5.5).to_json() == {
        "requests": 2,
        "prompt_tokens": 6,
        "cached_prompt_tokens": 4,
        "output_tokens": 11,
        "preemptions": 3,
        "steps": 4,
        "drafted_tokens": 10,
        "accepted_tokens": 6,
        "acceptance_length": 9 / 4,
        "acceptance_rate": 0.6,
        "acceptance_histogram": [1, 2, 0, 1],
        "conditional_acceptance": [0.75, 1.0, 1.0],
        "median_time_to_first_token_s": 1.0,
        "median_time_per_output_token_s": 0.375,
        "interactivity": pytest.approx(1 / 0.375),
        "wall_s": 5.5,
        "output_throughput": 2.0,
    }
    empty = total([])
    assert empty.acceptance_length is None and empty.interactivity is None
    assert empty.output_throughput is None
    json.dumps(empty.to_json(), allow_nan=False)

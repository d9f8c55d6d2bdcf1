"""Metrics by hand-made requests: every formula, and None where there is nothing to measure."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest
from dflash_perf.harness.acceptance import AcceptanceProfile
from dflash_perf.harness.config import Goodput, OfferedLoad
from dflash_perf.harness.distribution import Spread, describe
from dflash_perf.harness.metrics import (
    REQUEST_METRICS,
    AcceptanceLength,
    AcceptanceRate,
    ClientCpuShare,
    EndToEndRate,
    FailedShare,
    GoodputRate,
    Interactivity,
    OutputThroughput,
    OutputThroughputPerGpu,
    RequestThroughput,
    TimePerOutputToken,
    definition,
    run_metrics,
)
from dflash_perf.harness.points import RunSummary, group
from dflash_perf.harness.records import Client, RequestRecord, RunRecord

CLIENT = Client(cpu_share=0.25, loop_lag_p99_s=None)


def request(tokens: int | None, ttft_s: float, e2e_s: float, **more: object) -> RequestRecord:
    base = RequestRecord(index=0, prompt=0, sent_s=0, output_tokens=tokens, token_source="counts")
    return replace(base, ttft_s=ttft_s, e2e_s=e2e_s, **more)  # type: ignore[arg-type]


def run(*requests: RequestRecord, window_s: float = 4.0, gpus: int | None = None) -> RunRecord:
    return RunRecord(requests=requests, window_s=window_s, client=CLIENT, gpus=gpus)


FAILED = RequestRecord(index=3, prompt=0, sent_s=0, error="no")


def test_time_per_output_token_leaves_the_first_out() -> None:
    metric = TimePerOutputToken()
    assert metric.of(request(11, 0.5, 1.5)) == pytest.approx(0.1)
    assert metric.of(request(1, 0.5, 0.5)) is None
    assert metric.of(request(None, 0.5, 1.5)) is None
    assert EndToEndRate().of(request(11, 0.5, 1.5)) == pytest.approx(11 / 1.5)


def test_interactivity_ranks_seconds_and_inverts_last() -> None:
    # TPOT 0.1, 0.1, 0.4, 0.5: the median is 0.25, not the mean of two rates.
    seconds = (0.1, 0.1, 0.4, 0.5)
    found = Interactivity().of(run(*(request(2, 1.0, 1.0 + value) for value in seconds)))
    assert found == pytest.approx(1 / 0.25)
    assert found != pytest.approx(statistics.median(1 / value for value in seconds))


def test_throughput_counts_output_tokens_of_completed_requests() -> None:
    both = run(request(30, 1, 2), request(10, 1, 2), FAILED)
    assert OutputThroughput().of(both) == 10
    assert OutputThroughputPerGpu().of(both) is None
    assert OutputThroughputPerGpu().of(replace(both, gpus=4)) == 2.5
    assert RequestThroughput().of(both) == 0.5
    assert FailedShare().of(both) == pytest.approx(1 / 3)
    assert ClientCpuShare().of(both) == 0.25
    assert OutputThroughput().of(run(request(30, 1, 2), request(None, 1, 2))) is None
    assert OutputThroughput().of(run(FAILED)) is None


@pytest.mark.parametrize(
    ("limits", "good"),
    [
        ({"ttft": 100}, 2),
        ({"tpot": 10}, 2),
        ({"ttft": 100, "tpot": 10}, 1),
        ({"e2e": 250}, 1),
        ({"ttft": 100, "tpot": 10, "e2e": 1}, 0),
    ],
)
def test_goodput_needs_every_limit(limits: dict[str, float], good: int) -> None:
    requests = (
        request(11, 0.1, 0.2),  # TTFT 100 ms, TPOT 10 ms: at both limits
        request(11, 0.2, 0.3),
        request(11, 0.05, 1.05),
        FAILED,
    )
    assert GoodputRate(Goodput(**limits)).of(run(*requests)) == good / 4
    assert GoodputRate(Goodput()).of(run(*requests)) is None


def test_acceptance_of_the_server_counts() -> None:
    # 3 steps that emitted 1, 4 and 4 tokens; block 4.
    drafted = request(
        10, 1, 2, verify_steps=3, drafted_tokens=9, accepted_tokens=6, histogram=(1, 0, 0, 2)
    )
    plain = request(10, 1, 2, verify_steps=9, drafted_tokens=0, accepted_tokens=0, histogram=(9,))
    assert AcceptanceLength().of(run(drafted, plain)) == 3
    assert AcceptanceLength().of(run(replace(drafted, histogram=None))) == 3
    assert AcceptanceRate().of(run(drafted, plain)) == pytest.approx(6 / 9)
    assert AcceptanceLength().of(run(plain)) is None
    assert AcceptanceRate().of(run(plain)) is None


def test_conditional_acceptance_from_the_histogram_and_from_trials() -> None:
    one = request(9, 1, 2, drafted_tokens=21, histogram=(2, 1, 0, 4))
    profile = AcceptanceProfile.of([one, FAILED])
    assert profile is not None and profile.basis == "histogram"
    assert profile.conditional == (5 / 7, 4 / 5, 1.0)
    told = replace(one, position_trials=(6, 4, 0), position_accepts=(5, 4, 0))
    profile = AcceptanceProfile.of([told])
    assert profile is not None and profile.basis == "trials"
    assert profile.conditional == (5 / 6, 1.0, None)
    assert AcceptanceProfile.from_json(profile.to_json()) == profile
    assert AcceptanceProfile.of([request(9, 1, 2)]) is None


def test_spread_is_students_t() -> None:
    from scipy import stats

    values = [10.0, 12.0, 11.0, 15.0]
    spread = Spread.of(values)
    assert spread is not None and spread.half_width is not None
    low, high = stats.t.interval(0.95, 3, loc=12.0, scale=stats.sem(values))
    assert (spread.mean - spread.half_width, spread.mean + spread.half_width) == pytest.approx(
        (low, high)
    )
    single = Spread.of([3.0])
    assert single is not None and single.half_width is None
    assert Spread.of([]) is None


def test_distribution_of_few_values() -> None:
    assert describe([2.0])["p99"] == 2.0
    numbers = describe([1.0, 2.0, 3.0, 4.0, 5.0])
    assert (numbers["p50"], numbers["avg"], numbers["min"], numbers["max"]) == (3, 3, 1, 5)


def test_every_metric_states_its_formula() -> None:
    for metric in REQUEST_METRICS:
        assert definition(metric) and "\n" not in definition(metric)
        assert metric.tag and metric.title and metric.unit
    for metric in run_metrics(Goodput()):
        assert "=" in definition(metric)


def test_a_point_averages_seconds_before_it_inverts() -> None:
    runs = [
        RunSummary.of(
            run(request(2, 1.0, 1.0 + tpot)),
            configuration="a",
            load=OfferedLoad(concurrency=1),
            repeat=repeat,
            seed=repeat,
            goodput=Goodput(),
        )
        for repeat, tpot in enumerate((0.1, 0.3))
    ]
    (point,) = group(runs)
    assert point.interactivity == pytest.approx(1 / 0.2)
    assert point.throughput is not None and point.throughput.count == 2
    assert any("fewer than 10" in note for note in point.notes)
    assert RunSummary.from_json(runs[0].to_json()) == runs[0]


def test_a_record_survives_its_line() -> None:
    one = request(9, 1, 2, histogram=(1, 2), finish_reason="length")
    assert RequestRecord.from_json(one.to_json()) == replace(one)
    assert RequestRecord.from_json(FAILED.to_json()) == FAILED

"""Figures of runs and their fronts, against what they are by definition."""

from __future__ import annotations

import itertools
import json
import statistics
from dataclasses import replace

import pytest
from dflash_perf.front import Front, FrontPoint
from dflash_perf.harness import load_metrics as metrics
from dflash_perf.harness.interactivity import SweepAnswer
from dflash_perf.harness.load_metrics import (
    REQUEST_METRICS,
    RUN_METRICS,
    AcceptanceProfile,
    Spread,
    definition,
)
from dflash_perf.harness.points import RunPlan, RunSummary, group
from dflash_perf.harness.records import RequestRecord, RunRecord
from dflash_perf.harness.sweep_config import Goodput, OfferedLoad
from dflash_perf.report.content import choose_interactivity
from hypothesis import given, settings
from hypothesis import strategies as st


def request(tokens: int | None, ttft_s: float, e2e_s: float, **more: object) -> RequestRecord:
    base = RequestRecord(index=0, prompt=0, sent_s=0, output_tokens=tokens, token_source="counts")
    return replace(base, ttft_s=ttft_s, e2e_s=e2e_s, **more)  # type: ignore[arg-type]


def run(*requests: RequestRecord, **more: object) -> RunRecord:
    base = RunRecord(requests=requests, window_s=4.0, client_cpu_share=0.25)
    return replace(base, **more)  # type: ignore[arg-type]


FAILED = RequestRecord(index=3, prompt=0, sent_s=0, error="no")


def test_interactivity_ranks_seconds_and_inverts_last() -> None:
    assert metrics.tpot(request(11, 0.5, 1.5)) == pytest.approx(0.1)  # without the first token
    assert metrics.tpot(request(1, 0.5, 0.5)) is metrics.tpot(request(None, 0.5, 1.5)) is None
    # TPOT 0.1, 0.1, 0.4, 0.5: the median is 0.25, not the mean of two rates.
    seconds = (0.1, 0.1, 0.4, 0.5)
    found = metrics.interactivity(run(*(request(2, 1.0, 1.0 + value) for value in seconds)))
    assert found == pytest.approx(1 / 0.25)
    assert found != pytest.approx(statistics.median(1 / value for value in seconds))


def test_throughput_counts_output_tokens_of_completed_requests() -> None:
    both = run(request(30, 1, 2), request(10, 1, 2), FAILED)
    assert metrics.output_throughput(both) == 10
    assert metrics.output_throughput_per_gpu(both) is None
    assert metrics.output_throughput_per_gpu(replace(both, gpus=4)) == 2.5
    assert metrics.output_throughput(run(request(30, 1, 2), request(None, 1, 2))) is None
    assert metrics.output_throughput(run(FAILED)) is None


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
    assert metrics.goodput(run(*requests, goodput=Goodput(**limits))) == good / 4
    assert metrics.goodput(run(*requests)) is None


def test_acceptance_of_the_server_counts() -> None:
    # 3 steps that emitted 1, 4 and 4 tokens; block 4.
    drafted = request(
        10, 1, 2, verify_steps=3, drafted_tokens=9, accepted_tokens=6, histogram=(1, 0, 0, 2)
    )
    plain = request(10, 1, 2, verify_steps=9, drafted_tokens=0, accepted_tokens=0, histogram=(9,))
    assert metrics.acceptance_length(run(drafted, plain)) == 3
    assert metrics.acceptance_length(run(replace(drafted, histogram=None))) == 3
    assert metrics.acceptance_length(run(plain)) is None


def test_conditional_acceptance_from_the_histogram_and_from_trials() -> None:
    one = request(9, 1, 2, drafted_tokens=21, histogram=(2, 1, 0, 4))
    profile = AcceptanceProfile.of([one, FAILED])
    assert profile is not None and profile.conditional_basis == "histogram"
    assert profile.conditional == (5 / 7, 4 / 5, 1.0)
    told = replace(one, position_trials=(6, 4, 0), position_accepts=(5, 4, 0))
    profile = AcceptanceProfile.of([told])
    assert profile is not None and profile.conditional_basis == "trials"
    assert profile.conditional == (5 / 6, 1.0, None)
    assert AcceptanceProfile.of([request(9, 1, 2)]) is None


def test_spread_is_students_t() -> None:
    from scipy import stats

    values = [10.0, 12.0, 11.0, 15.0]
    spread = Spread.of(values)
    assert spread is not None and spread.confidence_95_half_width is not None
    expected = stats.t.interval(0.95, 3, loc=12.0, scale=stats.sem(values))
    found = (
        spread.mean - spread.confidence_95_half_width,
        spread.mean + spread.confidence_95_half_width,
    )
    assert found == pytest.approx(expected)
    single = Spread.of([3.0])
    assert single is not None and single.confidence_95_half_width is None and Spread.of([]) is None


def test_every_metric_states_its_formula() -> None:
    assert all(map(definition, REQUEST_METRICS.values()))
    assert all("=" in definition(figure) for figure in RUN_METRICS.values())


def test_a_point_averages_seconds_before_it_inverts() -> None:
    runs = [
        RunSummary.of(
            RunPlan("a", OfferedLoad(concurrency=1), repeat, seed=repeat),
            run(request(2, 1.0, 1.0 + tpot, drafted_tokens=4, histogram=(1, 1))),
        )
        for repeat, tpot in enumerate((0.1, 0.3))
    ]
    (point,) = group(runs)
    assert point.interactivity == pytest.approx(1 / 0.2)
    assert point.throughput is not None and point.throughput.runs == 2
    assert any("fewer than 10" in note for note in point.notes)
    assert RunSummary.from_json(json.loads(json.dumps(runs[0].to_json()))) == runs[0]


def test_a_record_survives_its_line() -> None:
    one = request(9, 1, 2, histogram=(1, 2), finish_reason="length")
    assert RequestRecord.from_json({**one.to_json(), "of_an_older_version": 1}) == one
    assert RequestRecord.from_json(FAILED.to_json()) == FAILED


POINTS = st.lists(
    st.tuples(st.integers(1, 60), st.integers(1, 60)).map(lambda p: FrontPoint(p[0], p[1], "")),
    min_size=1,
    max_size=14,
)


def _front(*ends: tuple[float, float]) -> Front:
    names = ["concurrency 8", "concurrency 4", "concurrency 1"]
    return Front(FrontPoint(x, y, name) for (x, y), name in zip(ends, names, strict=False))


@settings(deadline=None)
@given(POINTS, st.floats(0.5, 61))
def test_a_front_keeps_what_nothing_beats_and_stays_between(
    points: list[FrontPoint], rate: float
) -> None:
    front = Front(points)
    kept = [(point.interactivity, point.throughput) for point in front.points]
    assert kept == sorted(kept) and all(a[1] > b[1] for a, b in itertools.pairwise(kept))
    for point in points:
        assert any(x >= point.interactivity and y >= point.throughput for x, y in kept)
    value = front.at(rate)
    assert (value is None) == (rate > kept[-1][0])
    if value is not None and value.is_least:
        assert rate < kept[0][0] and value.throughput == kept[0][1]
    elif value is not None:
        assert value.above.throughput <= value.throughput + 1e-9
        assert value.throughput <= value.below.throughput + 1e-9
        assert value.below.interactivity <= rate <= value.above.interactivity
    curve = [y for _, y in front.curve()]
    assert all(a >= b - 1e-9 for a, b in itertools.pairwise(curve))


def test_measured_points_are_met_exactly() -> None:
    value = _front((10, 100), (20, 80), (40, 10)).at(20)
    assert value is not None and value.throughput == 80 and value.below == value.above
    assert value.near == 3 and value.is_sparse
    assert Front([]).at(10) is None
    close = Front([FrontPoint(x, 100 - x, "") for x in (10, 14, 18, 22, 90)]).at(15)
    assert close is not None and close.near == 4 and not close.is_sparse


def test_answers_name_brackets_and_what_is_missing() -> None:
    fronts = {"slow": _front((10, 100), (20, 60)), "fast": _front((20, 400), (90, 50))}
    fronts["none"] = Front([])
    text = "\n".join(SweepAnswer(20, "slow", fronts).lines("tokens/s"))
    assert "slow: 60 tokens/s; measured 20 → 60 (concurrency 4); few points: 2" in text
    assert "fast: 400 tokens/s, 6.67 × slow; measured 20 → 400 (concurrency 8)" in text
    assert "none: not measured" in text
    between = SweepAnswer(15, "slow", fronts)
    assert "between 10 → 100 (concurrency 8) and 20 → 60" in between.lines("t")[1]
    beyond = SweepAnswer(50, "slow", fronts)
    assert beyond.ratio("fast") is None and beyond.to_json()["configurations"]["slow"] is None
    assert beyond.lines("t")[1] == "  slow: not measured; nearest 20 → 60 (concurrency 4)"


def test_whoever_is_faster_at_every_load_gives_at_least_its_most() -> None:
    """A slow baseline is no reason for an empty answer; a slow baseline's rival is no ratio."""
    fronts = {"slow": _front((5, 40), (10, 10)), "fast": _front((20, 400), (90, 50))}
    one = SweepAnswer(10, "slow", fronts)
    line = "  fast: ≥ 400 tokens/s, ≥ 40.00 × slow; measured 20 → 400 (concurrency 8); heavier"
    assert one.lines("tokens/s")[2].startswith(line) and one.ratio("fast") == 40
    other = SweepAnswer(10, "fast", fronts)
    assert other.ratio("slow") is None and other.ratio("fast") == 1


@pytest.mark.parametrize(
    ("names", "baseline", "chosen"),
    [
        (("base", "one", "two"), "base", [40]),  # they part at 40 and 60: the most that all reach
        (("base", "one"), "base", [pytest.approx(34.64, abs=0.01)]),
        (("two", "base"), "two", [60]),  # below, nothing is known of the baseline
        ((), "base", []),
    ],
)
def test_an_interactivity_that_all_reach_is_chosen(
    names: tuple[str, ...], baseline: str, chosen: list[float]
) -> None:
    ends = {"base": (10, 40), "one": (30, 100), "two": (60, 120)}
    fronts = {name: _front((ends[name][0], 9), (ends[name][1], 1)) for name in names}
    assert choose_interactivity(fronts, baseline) == chosen

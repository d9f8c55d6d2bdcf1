"""The front: only what no point beats, monotone between, nothing beyond."""

from __future__ import annotations

import itertools

import pytest
from dflash_perf.front import Front, FrontPoint, pareto_front
from dflash_perf.harness.interactivity import SweepAnswer
from dflash_perf.report.content import choose_interactivity
from hypothesis import given, settings
from hypothesis import strategies as st

POINTS = st.lists(
    st.tuples(st.integers(1, 60), st.integers(1, 60)).map(lambda p: FrontPoint(p[0], p[1], "")),
    min_size=1,
    max_size=14,
)


@settings(deadline=None)
@given(POINTS)
def test_the_front_is_what_nothing_beats(points: list[FrontPoint]) -> None:
    front = pareto_front(points)
    coordinates = [(point.interactivity, point.throughput) for point in front]
    assert coordinates == sorted(coordinates)
    assert all(a[1] > b[1] for a, b in itertools.pairwise(coordinates))
    for point in points:
        beaten = any(x >= point.interactivity and y >= point.throughput for x, y in coordinates)
        assert beaten


@settings(deadline=None)
@given(POINTS, st.floats(0.5, 61))
def test_between_points_it_stays_between_them(points: list[FrontPoint], rate: float) -> None:
    front = Front(points)
    value = front.at(rate)
    low, high = front.points[0].interactivity, front.points[-1].interactivity
    assert (value is None) == (rate > high)
    if value is not None and value.is_least:
        assert rate < low and value.throughput == front.points[0].throughput
    elif value is not None:
        assert value.above.throughput <= value.throughput + 1e-9
        assert value.throughput <= value.below.throughput + 1e-9
        assert value.below.interactivity <= rate <= value.above.interactivity
    curve = [y for _, y in front.curve(50)]
    assert all(a >= b - 1e-9 for a, b in itertools.pairwise(curve))


def test_measured_points_are_met_exactly() -> None:
    front = Front([FrontPoint(10, 100, "c8"), FrontPoint(20, 80, "c4"), FrontPoint(40, 10, "c1")])
    value = front.at(20)
    assert value is not None
    assert value.throughput == 80 and value.below == value.above
    assert value.near == 3 and value.is_sparse
    assert Front([FrontPoint(10, 100, "")]).at(10) is not None
    assert Front([]).at(10) is None


def test_four_points_within_a_factor_of_two_are_enough() -> None:
    front = Front([FrontPoint(x, 100 - x, "") for x in (10, 14, 18, 22, 90)])
    value = front.at(15)
    assert value is not None and value.near == 4 and not value.is_sparse


def test_answers_name_brackets_and_what_is_missing() -> None:
    slow = Front([FrontPoint(10, 100, "concurrency 8"), FrontPoint(30, 20, "concurrency 1")])
    fast = Front([FrontPoint(20, 400, "concurrency 8"), FrontPoint(90, 50, "concurrency 1")])
    one = SweepAnswer(20, "slow", {"slow": slow.at(20), "fast": fast.at(20), "none": None})
    assert one.ratio("fast") == pytest.approx(400 / 60)
    text = "\n".join(one.lines("tokens/s"))
    assert "slow: 60 tokens/s; between 10 → 100 (concurrency 8) and 30 → 20" in text
    assert "few points: 2 measured" in text
    assert "fast: 400 tokens/s, 6.67 × slow; measured 20 → 400 (concurrency 8)" in text
    assert "none: not measured" in text
    assert one.to_json()["configurations"]["none"] is None
    beyond = SweepAnswer(50, "slow", {"slow": slow.at(50), "fast": fast.at(50)})
    assert beyond.ratio("fast") is None
    assert "fast: " in beyond.lines("t")[2] and "not measured" in beyond.lines("t")[2]


def test_outside_of_what_was_measured_the_nearest_point_is_named() -> None:
    front = Front([FrontPoint(50, 400, "concurrency 8"), FrontPoint(90, 50, "concurrency 1")])
    assert front.nearest(20) == front.points[0] and front.nearest(80) == front.points[1]
    assert Front([]).nearest(20) is None
    one = SweepAnswer(95, "a", {"b": front.at(95)}, {"b": front.nearest(95)})
    assert one.lines("tokens/s")[1] == "  b: not measured; nearest 90 → 50 (concurrency 1)"
    assert one.to_json()["nearest"]["b"]["throughput"] == 50


def test_whoever_is_faster_at_every_load_gives_at_least_its_most() -> None:
    """A slow baseline is no reason for an empty answer; a slow baseline's rival is no ratio."""
    slow = Front([FrontPoint(5, 40, "concurrency 8"), FrontPoint(10, 10, "concurrency 1")])
    fast = Front([FrontPoint(20, 400, "concurrency 8"), FrontPoint(90, 50, "concurrency 1")])
    one = SweepAnswer(10, "slow", {"slow": slow.at(10), "fast": fast.at(10)})
    line = "  fast: ≥ 400 tokens/s, ≥ 40.00 × slow; measured 20 → 400 (concurrency 8); heavier"
    assert one.lines("tokens/s")[2].startswith(line)
    assert one.ratio("fast") == 40 and one.is_least("fast") and not one.is_least("slow")
    other = SweepAnswer(10, "fast", one.values)
    assert other.ratio("slow") is None and other.ratio("fast") == 1


def test_an_interactivity_that_all_reach_is_chosen() -> None:
    fronts = {
        name: Front([FrontPoint(low, 9, ""), FrontPoint(high, 1, "")])
        for name, low, high in [("base", 10, 40), ("one", 30, 100), ("two", 60, 120)]
    }
    (chosen,) = choose_interactivity(fronts, "base")
    assert chosen == 40  # they part at 40 and 60: the most that all reach
    (chosen,) = choose_interactivity({name: fronts[name] for name in ("base", "one")}, "base")
    assert chosen == 35
    narrow = Front([FrontPoint(33.81, 9, ""), FrontPoint(33.99, 1, "")])
    assert choose_interactivity({"base": narrow}, "base") == [33.9]
    (chosen,) = choose_interactivity({"base": fronts["two"], "slow": fronts["base"]}, "base")
    assert chosen == 60  # below, nothing is known of the baseline
    assert choose_interactivity({}, "base") == []


@pytest.mark.parametrize(("low", "high"), [(83.0, 98.68629), (98.68621, 98.68629), (3.0, 9.999999)])
def test_what_was_rounded_is_still_reached(low: float, high: float) -> None:
    """A slow baseline that ends just below a round number."""
    slow = Front([FrontPoint(low, 90, ""), FrontPoint(high, 10, "")])
    fast = Front([FrontPoint(2 * high, 400, ""), FrontPoint(3 * high, 50, "")])
    (chosen,) = choose_interactivity({"base": slow, "fast": fast}, "base")
    assert slow.at(chosen) is not None and fast.at(chosen) is not None

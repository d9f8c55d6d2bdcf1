"""The front: only what no point beats, monotone between, nothing beyond; and its answers."""

from __future__ import annotations

import itertools

import pytest
from dflash_perf.front import Front, FrontPoint
from dflash_perf.harness.interactivity import SweepAnswer
from dflash_perf.report.content import choose_interactivity
from hypothesis import given, settings
from hypothesis import strategies as st

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

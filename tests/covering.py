"""Which combinations of parameters run every day, and which at all: covering arrays of cases.

With `@pytest.mark.covering(2)`, every value of a parameter meets every value of each other one in
some daily case; with `covering(1)` every value is seen. One more meets in the exhaustive cases. All
that are left over are marked `full` beside: hours for combinations that nothing points to.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import pytest


def exhaustive(*values: object) -> object:
    """The values of one case, for `parametrize`, that a daily run leaves out."""
    return pytest.param(*values, marks=pytest.mark.exhaustive)


def mark_exhaustive(items: Sequence[pytest.Item]) -> None:
    """Marks the cases of tests marked `covering` that a daily or an exhaustive run leaves out."""
    tests: dict[str, list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("covering"):
            tests.setdefault(item.nodeid.split("[")[0], []).append(item)
    for cases in tests.values():
        marker = cases[0].get_closest_marker("covering")
        assert marker is not None
        (strength,) = marker.args
        left = [case for case in cases if not case.get_closest_marker("exhaustive")]
        daily = _cover(left, strength)
        often = daily | _cover(cases, strength + 1)
        for case in cases:
            if case not in daily:
                case.add_marker(pytest.mark.exhaustive)
            if case not in often:
                case.add_marker(pytest.mark.full)


def _cover(cases: Sequence[pytest.Function], strength: int) -> set[pytest.Function]:
    chosen = cover([_meetings(case, strength) for case in cases])
    return {cases[number] for number in chosen}


def cover(sets: Sequence[frozenset[object]]) -> set[int]:
    """Indices of a few `sets` whose union is that of all: the greedy choice, ties to the first."""
    missing = set[object]().union(*sets)
    chosen: set[int] = set()
    while missing:
        best = max(range(len(sets)), key=lambda number: len(sets[number] & missing))
        chosen.add(best)
        missing -= sets[best]
    return chosen


def _meetings(case: pytest.Function, strength: int) -> frozenset[object]:
    """Every `strength` values of different parameters that the case brings together."""
    parameters = case.callspec.params if hasattr(case, "callspec") else {}
    # All cases hold the same objects, whether or not they can be compared.
    values = [(name, id(value)) for name, value in sorted(parameters.items())]
    return frozenset(combinations(values, min(strength, len(values)))) or frozenset({()})

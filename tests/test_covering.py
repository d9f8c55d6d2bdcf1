"""A daily run leaves out cases, and no value or meeting of values that it promises."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from tests.covering import cover


@pytest.mark.parametrize(("strength", "most"), [(1, 5), (2, 20), (3, 60)])
def test_every_meeting_is_in_a_chosen_case(strength: int, most: int) -> None:
    cases = list(product(range(5), range(4), range(3)))
    meetings = [frozenset(combinations(enumerate(case), strength)) for case in cases]
    chosen = cover(meetings)
    assert frozenset().union(*(meetings[number] for number in chosen)) == frozenset().union(
        *meetings
    )
    assert len(chosen) <= most

"""An order of cases in which every beginning is spread over all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

Item = TypeVar("Item")


def spread(cases: Sequence[Item]) -> list[Item]:
    """The first case, then the one in the middle, then those between, and so on.

    Whoever stops early has then seen some of every kind: neighbours in a table are alike.
    """
    bits = max(1, (len(cases) - 1).bit_length())
    places = (int(f"{number:0{bits}b}"[::-1], 2) for number in range(1 << bits))
    return [cases[place] for place in places if place < len(cases)]

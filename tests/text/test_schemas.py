"""Outputs of random tokens: those of a bounded schema end, and what is whole is valid."""

from __future__ import annotations

import pytest

from tests.text.generations import Drawer, count_endings, is_valid
from tests.text.schemas import all_schemas


def test_some_outputs_are_valid() -> None:
    drawer, every = Drawer(), all_schemas()
    for name in list(every)[50::40]:
        drawn = drawer.draw(every[name], seed=1)
        assert drawn.text is not None, name
        assert is_valid(drawn.text, every[name]), (name, drawn.text)


@pytest.mark.exhaustive
def test_all_schemas() -> None:
    count = len(all_schemas())
    ends = count_endings(2 * count, seed=7)
    assert count > 200 and ends["bounded"] > 400
    assert ends["bounded, whole"] == ends["bounded"], ends
    assert ends["open, whole"] > 10 and not ends["open, refused"]


def test_what_breaks_its_schema_is_told() -> None:
    assert not is_valid('{"a": 1}', {"type": "array"})

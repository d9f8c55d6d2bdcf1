"""YAML whose values would fail somewhere else."""

from __future__ import annotations

import pytest

from dflash_trt.core.yaml_files import MOST_VALUES, parse_yaml
from dflash_trt.errors import DflashError


@pytest.mark.parametrize("number", ["0x" + "f" * 5000, "9" * 5000])
def test_a_number_that_cannot_be_printed(number: str) -> None:
    """An error message that quotes it would be a traceback."""
    with pytest.raises(DflashError, match="is not valid YAML: Exceeds the limit"):
        parse_yaml(f"max_batch: {number}", "pair.yaml")


@pytest.mark.parametrize("end", ["", ".5"])
def test_numbers_in_base_60(end: str) -> None:
    """A megabyte of one took 20 s, or was a traceback."""
    with pytest.raises(DflashError, match="is a number in base 60"):
        parse_yaml(f"max_batch: 1{':59' * 300_000}{end}", "pair.yaml")


def test_a_key_given_twice() -> None:
    with pytest.raises(DflashError, match="key 'a' is given twice"):
        parse_yaml("a: 1\nb: 2\na: 3", "pair.yaml")


def test_more_values_than_a_file_needs() -> None:
    """A megabyte of them took half a minute."""
    many = "\n".join(f"k{number}: 1" for number in range(MOST_VALUES // 2))
    with pytest.raises(DflashError, match="more than 20,000 keys and values"):
        parse_yaml(many, "pair.yaml")
    few = "\n".join(f"k{number}: 1" for number in range(MOST_VALUES // 20))
    assert len(parse_yaml(few, "pair.yaml")) == MOST_VALUES // 20

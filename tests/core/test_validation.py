"""Mistakes in a file: all of them at once, each under the key that the file has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field

from dflash_trt.core.validation import validate
from dflash_trt.errors import DflashError


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Cat(_Strict):
    kind: Literal["cat"]
    lives: int = 9


class Dog(_Strict):
    kind: Literal["dog"]
    tricks: tuple[str, ...] = ()


@dataclass
class Home:
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    rooms: int


class Household(_Strict):
    name: str
    home: Home
    animal: Annotated[Cat | Dog, Field(discriminator="kind")] | None = None
    ages: dict[str, Annotated[int, Field(ge=0)]] = {}
    size: int | bool | None = None
    others: list[Cat] = []


GOOD: dict[str, Any] = {"name": "n", "home": {"rooms": 2}}


def _refusal(**changed: Any) -> str:
    raw = {key: value for key, value in {**GOOD, **changed}.items() if value is not ...}
    with pytest.raises(DflashError) as caught:
        validate(Household, raw, "f.yaml", fix="mend it", usage=True)
    error = caught.value
    assert (error.where, error.fix, error.exit_code) == ("f.yaml", "mend it", 2)
    assert len(error.what) < 460
    return error.what


def test_all_mistakes_in_one_line() -> None:
    assert _refusal(name=3, home={"rooms": "two"}, ages={"a": -1}) == (
        "3 errors: name: Input should be a valid string, got 3; home.rooms: Input should be a "
        "valid integer, unable to parse string as an integer, got 'two'; ages.a: Input should be "
        "greater than or equal to 0, got -1"
    )


def test_a_misspelt_key_is_one_mistake() -> None:
    """It is missing under its own name too."""
    assert _refusal(name=..., nmae="n") == "unknown key 'nmae' (nearest: 'name')"
    assert _refusal(name=...) == "name is missing, a required key"
    both = _refusal(name=..., home={"romms": 2})
    assert both == (
        "2 errors: unknown key 'home.romms' (nearest: 'rooms'); name is missing, a required key"
    )


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"animal": {"kind": "dog", "trick": []}}, "'animal.trick' (nearest: 'tricks')"),
        ({"animal": {"kind": "cat", "life": 1}}, "'animal.life' (nearest: 'lives')"),
        ({"others": [{"kind": "cat", "zz": 1}]}, "'others.0.zz' (known: name, home"),
        ({"size": "x"}, "size: Input should be a valid integer"),
        ({"ages": {"a": 1, "b": "y"}}, "ages.b: "),
    ],
)
def test_keys_are_those_of_the_file(changed: dict[str, Any], what: str) -> None:
    """Tags of unions are not, and a value that fits none of a union is one mistake."""
    said = _refusal(**changed)
    assert what in said and "errors" not in said


def test_many_mistakes_are_told_by_their_keys() -> None:
    said = _refusal(**{f"key{number}": 0 for number in range(30)})
    assert said.startswith("30 errors: unknown key 'key0'")
    assert "; and 24 more: key6, key7" in said

"""Grammars: which tokens may come next, and what is no grammar."""

from __future__ import annotations

import json
import re
import resource
import time
from datetime import datetime, timedelta
from decimal import Decimal
from functools import cache
from ipaddress import IPv4Address
from pathlib import Path
from random import Random
from typing import Annotated, Any, Literal
from uuid import UUID

import numpy as np
import pytest
from pydantic import BaseModel, Field

from dflash_trt.errors import DflashError
from dflash_trt.text import grammar
from dflash_trt.text.grammar import MAX_BYTES, Follower, Grammar, GrammarCompiler
from dflash_trt.text.json_schema import enforce_schema
from dflash_trt.text.sandbox import Sandbox
from tests.covering import exhaustive
from tests.hostile.grammars import HostileGrammar, hostile_grammars
from tests.inspection import allows_all
from tests.text.tokenizers import make_plain

CORE = make_plain("<end>")
END, SIZE = CORE.token_to_id("<end>"), CORE.get_vocab_size() + 3


def new_compiler(*ends: int) -> GrammarCompiler:
    return GrammarCompiler(CORE, SIZE, ends or (END,))


compiler = cache(new_compiler)
"""One for all tests that leave it as it was: starting what tries grammars takes a while."""


def allowed(follower: Follower) -> set[str]:
    """The characters that may come next, and "" for the end."""
    row = follower.tokens().apply(np.zeros(SIZE, np.float32))
    ids = np.flatnonzero(np.isfinite(row)).tolist()
    return {"" if one == END else CORE.decode([one]) for one in ids}


def follow(follower: Follower, text: str) -> Follower:
    for token_id in CORE.encode(text).ids:
        follower.take(token_id)
    return follower


def test_what_may_come_next() -> None:
    start = compiler().compile(Grammar("regex", "ab?(12|19)"))
    assert allowed(start) == {"a"} == allowed(start), "looking changes nothing"
    assert allowed(follow(start.fork(), "a")) == {"b", "1"}
    assert allowed(follow(start.fork(), "ab1")) == {"2", "9"}
    assert allowed(follow(start.fork(), "a19")) == {""}
    assert allowed(start) == {"a"}, "each output has one of its own"


def test_schemas() -> None:
    schema = {
        "type": "object",
        "properties": {"state": {"enum": ["ok", "lost"]}},
        "required": ["state"],
        "additionalProperties": False,
    }
    start = compiler().compile(Grammar("json_schema", json.dumps(schema)))
    assert allowed(follow(start.fork(), '{"state":"')) == {"o", "l"}
    assert allowed(follow(start.fork(), '{"state":"ok"}')) == {""}
    anything = compiler().compile(Grammar("json_object"))
    assert allowed(follow(anything.fork(), '{"a": [1, {"b": null}]}')) == {""}
    assert allowed(start) == {"{"} and allowed(follow(start.fork(), "{")) == {" ", '"'}
    for one, after in ((start, "{ "), (anything, '{ "a": 1, "b":[ ')):
        assert not allowed(follow(one.fork(), after)) & {*" \n\t"}, "one blank, no line breaks"


_Color = Literal["red", "dark blue"]


class _Cat(BaseModel):
    kind: Literal["cat"] = "cat"
    lives: int = Field(9, ge=0, le=9)


class _Dog(BaseModel):
    kind: Literal["dog"] = "dog"
    name: str = Field(min_length=1, max_length=40, pattern=r"^[A-Z]\w*$")


class _Node(BaseModel):
    value: int
    children: list[_Node] = []
    parent: _Node | None = Field(None, description="up")


class _Everything(BaseModel):
    formats: tuple[datetime, timedelta, UUID, Decimal, Path, IPv4Address, bytes]
    by_color: dict[_Color, int]
    by_name: dict[Annotated[str, Field(pattern="^[a-z]+$")], int] = {}
    free: dict[str, Any] = {}
    pet: Annotated[_Cat | _Dog, Field(discriminator="kind")]
    either: int | str | None = None
    few: list[float] = Field(min_length=1, max_length=3)
    tree: _Node
    small: float = Field(gt=0, lt=1)
    fives: int = Field(multiple_of=5)
    best: _Color = "red"


def _pet(kind: str, *required: str) -> Any:
    properties = {"k": {"type": "string", "const": kind}, "x": {"type": "integer"}}
    return {"type": "object", "properties": properties, "required": [*required]}


_OLD_MAIL = (
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]"
    r"@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
)
_TEXT, _ANY = {"type": "string"}, {"type": "object"}
_ZOD_3 = {"$schema": "https://json-schema.org/draft-07/schema#", "type": "array"}
_NAMES: Any = {"type": "string", "enum": ["x", "y.z"]}
_UNION: Any = {"$defs": {"A": _pet("a"), "B": _pet("b")}, "discriminator": {"propertyName": "k"}}
DONE: list[tuple[Any, str, str]] = [
    ({**_TEXT, "format": "json-string"}, '"a"', "1"),
    ({**_TEXT, "format": "time", "pattern": "^[01][0-9]:[0-5][0-9]$"}, '"10:59"', '"10:59:00Z"'),
    ({**_TEXT, "pattern": r"^(?=.*[A-Z])(?=.*\d)[A-Z\d]{2,}$"}, '"A1"', '"AA"'),
    ({**_TEXT, "format": "email", "pattern": _OLD_MAIL}, '"a.b@c.de"', '"a..b@c.de"'),
    ({**_TEXT, "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"}, '"-.5"', '"-."'),
    ({**_TEXT, "pattern": r"^a\Z"}, '"a"', '"ab"'),
    ({**_ZOD_3, "items": [{"type": "integer"}], "additionalItems": False}, "[1]", '["a"]'),
    ({"type": "array", "uniqueItems": False}, "[1,1]", "{}"),
    ({**_ANY, "propertyNames": {"type": "string"}, "additionalProperties": _TEXT}, '{"a":"b"}', ""),
    (
        {**_ANY, "propertyNames": _NAMES, "additionalProperties": _TEXT},
        '{"y.z":"b"}',
        '{"yaz":"b"}',
    ),
    ({**_ANY, "propertyNames": {"pattern": "^a"}}, '{"ab":[1]}', '{"b":1}'),
    ({**_ANY, "patternProperties": {r"^ab\Z": _TEXT, "^bc?": {}}}, '{"b":1}', '{"ab":1}'),
    ({"anyOf": [{"not": {}}, {"type": "integer"}]}, "1", '"a"'),
    ({"type": "number", "minimum": -3.4e38, "maximum": 3.4e38}, "1.5", '"a"'),
    ({"oneOf": [{"const": 1}, {"const": 2}]}, "2", "3"),
    ({"oneOf": [_TEXT, {"type": ["integer", "null"]}]}, "null", "[]"),
    ({"oneOf": [_pet("a", "k"), _pet("b", "k")]}, '{"k":"b"}', '{"x":1}'),
    # Discriminators of pydantic have a default.
    ({**_UNION, "oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}]}, '{"k":"b"}', '{"x":1}'),
]
LEFT: list[tuple[Any, list[str], str]] = [
    ({"type": "array", "uniqueItems": True}, ["uniqueItems"], "[1,1]"),
    ({"type": "array", "contains": {"const": 1}}, ["contains"], "[2]"),
    ({**_ANY, "properties": {"a/b": {"not": _TEXT}}}, ["properties/a~1b/not"], '{"a/b":"c"}'),
    ({**_ANY, "if": {"required": ["a"]}, "then": {"required": ["b"]}}, ["if", "then"], '{"a":1}'),
    ({**_ANY, "propertyNames": {"format": "uuid"}}, ["propertyNames"], '{"a":1}'),
    ({**_ANY, "dependentRequired": {"a": ["b"]}}, ["dependentRequired"], '{"a":1}'),
    ({**_ANY, "properties": {"a": {}}, "minProperties": 1}, ["minProperties"], "{}"),
    (
        {"allOf": [{**_ANY, "unevaluatedProperties": False}]},
        ["allOf/0/unevaluatedProperties"],
        "{}",
    ),
    (
        {**_ANY, "patternProperties": {"^a": _TEXT, "b$": {}}, "additionalProperties": False},
        ["patternProperties"],
        '{"ab":1,"c":2}',
    ),
    ({**_ANY, "patternProperties": {"^(?!x)a$": _TEXT}}, ["patternProperties"], '{"a":1}'),
    ({**_TEXT, "pattern": "^(?!ab){2}x$"}, ["pattern"], '"x"'),
    ({"items": {**_TEXT, "pattern": "^(?!a)[a-z]$"}}, ["items/pattern"], '["a"]'),
    ({**_TEXT, "pattern": r"^(?=a)\w|b\b$"}, ["pattern"], '"b"'),
    ({**_TEXT, "pattern": r"^(a)\1$"}, ["pattern"], '"x"'),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, ["oneOf"], "1"),
    ({"oneOf": [_pet("a"), _pet("b")]}, ["oneOf"], "{}"),
]


def test_schemas_of_clients() -> None:
    """What pydantic, zod and those who build on them write is accepted and, but for LEFT, held."""
    for mode in ("validation", "serialization"):
        schema = _Everything.model_json_schema(mode=mode)  # type: ignore[arg-type]
        assert enforce_schema(json.dumps(schema))[1] == ()
        begins = allowed(compiler().compile(Grammar("json_schema", json.dumps(schema))))
        assert begins == {"{"}
    for schema, fits, other in DONE:
        text, relaxed = enforce_schema(json.dumps(schema))
        assert relaxed == () == enforce_schema(text)[1], schema
        _check_fit(schema, fits, other)


def test_what_is_left_out_of_schemas() -> None:
    for schema, pointers, fits in LEFT:
        relaxed = enforce_schema(json.dumps(schema))[1]
        named = [f'"{one.rpartition("/")[2]}" at /{one} is ' for one in pointers]
        assert all(map(str.startswith, relaxed, named)) and len(relaxed) == len(named), relaxed
        _check_fit(schema, fits)
    pattern = {"pattern": "^(?=a)(?!b)c"}
    assert enforce_schema(json.dumps(pattern))[1][0].endswith("is enforced without (?!b)")


def _check_fit(schema: Any, fits: str, other: str = "") -> None:
    start = compiler().compile(Grammar("json_schema", json.dumps(schema)))
    for text, does in ((fits, True), (other, False)):
        ids = [*CORE.encode(text).ids, END]
        assert allows_all(start.fork(), ids) == does, (schema, text)


def test_choices_and_rules() -> None:
    choice = compiler().compile(Grammar("choice", json.dumps(['a"\\', "ab/", "c\n"])))
    assert allowed(choice) == {"a", "c"}
    assert allowed(follow(choice.fork(), "a")) == {'"', "b"}
    assert allowed(follow(choice.fork(), "ab/")) == {""} == allowed(follow(choice.fork(), "c\n"))
    for rules in (
        'root ::= "x" y+\ny ::= [0-9] | "z" root?',
        'start: "x" y+\ny: /[0-9]/ | "z" start?',
    ):
        nested = compiler().compile(Grammar("grammar", rules))
        assert allowed(nested) == {"x"}
        assert allowed(follow(nested.fork(), "x")) == {*"0123456789z"}
        assert allowed(follow(nested.fork(), "x1z")) == {"x", *"0123456789z", ""}


@pytest.mark.parametrize(
    ("kind", "text", "piece"),
    [
        ("json_schema", "{", "grammar: "),
        ("json_schema", '{"type": "strin"}', "Invalid type: strin"),
        ("json_schema", '{"$ref": "http://localhost/x"}', "grammar: "),
        ("json_schema", "[" * 5000, "grammar: "),
        ("regex", "(", "grammar: "),
        ("regex", "x" * 65537, "65,537 characters are more than 65,536"),
        ("choice", '["a", ""]', "a choice is a list of texts, at least one, none empty"),
        ("choice", "[]", "a choice is a list of texts"),
        ("choice", "{", "not valid JSON"),
        ("grammar", "root ::= (", "is neither Lark nor GBNF: "),
        ("grammar", "root ::= " + "(" * 9000, "is neither Lark nor GBNF: "),
        ("grammar", "root ::= r0" * 2000, "22,000 characters of GBNF are more than 16,384"),
        ("grammar", "start: missing", "grammar: "),
        ("xml", "", "'xml' is none of json_object, json_schema, regex"),
    ],
)
def test_what_is_no_grammar(kind: str, text: str, piece: str) -> None:
    with pytest.raises(DflashError, match=re.escape(piece)) as caught:
        compiler().compile(Grammar(kind, text))  # type: ignore[arg-type]
    assert caught.value.usage and caught.value.message.isprintable()


def test_what_is_known_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    known = new_compiler()
    one, none = Grammar("regex", "ab"), Grammar("regex", "(")
    tried: list[str] = []
    ask = Sandbox.ask
    monkeypatch.setattr(
        Sandbox, "ask", lambda *given: tried.append(given[3].decode()) or ask(*given)
    )
    assert known.find(one) is None
    follow(known.compile(one), "a")
    found = known.find(Grammar("regex", "ab"))
    assert found is not None and allowed(found) == {"a"}, "where an output begins"
    for look in (known.compile, known.compile, known.find):
        with pytest.raises(DflashError, match="unclosed group") as caught:
            look(none)
        assert caught.value.usage
    assert len(tried) == 2
    monkeypatch.setattr(grammar, "_MOST_KEPT", 3)
    for text in "xy":
        known.compile(Grammar("regex", text))
    assert known.find(one) is None and known.find(Grammar("regex", "x")), "the oldest goes"


@pytest.mark.parametrize(
    ("draft", "most", "revised"),
    [
        ("abcd", 4, "abcd"),
        ("xxxx", 4, "abc"),
        ("axxd", 4, "abcd"),
        ("abcxdd", 6, "abc"),
        ("xxxeyyyy", 8, "abcefg|"),
        ("xxxexx", 5, "abcef"),
        ("", 4, "abc"),
    ],
)
def test_drafts_are_revised(draft: str, most: int, revised: str) -> None:
    """What must come is put in its place, and what may not ends the draft."""
    start = compiler().compile(Grammar("regex", "abc([d]{1,9}|efg)"))
    ids = start.revise(CORE.encode(draft).ids, most)
    assert "".join("|" if one == END else CORE.decode([one]) for one in ids) == revised
    assert allowed(start) == {"a"}, "it stays where it is"


def test_who_uses_up_a_lexer_harms_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """All outputs of a grammar share its states, of which there are 2^12 here."""
    monkeypatch.setitem(grammar._LIMITS, "max_lexer_states", 300)
    start = new_compiler().compile(Grammar("regex", "(a|b)*a(a|b){12}"))
    kept = follow(start.fork(), "ab")
    random = Random(5)
    for _ in range(60):
        one = start.fork()
        for _ in range(30):
            assert allowed(one) - {""} == {*"ab"}
            follow(one, random.choice("ab"))
        if one._start is not start._start:
            break
    else:
        pytest.fail("it was never used up")
    assert allowed(follow(kept, "a" * 11)) == {*"ab", ""}


EVERY = hostile_grammars()
DAILY = {
    "a product of repeats",
    "a large divisor",
    "references in a ring",
    "arrays in arrays",
}
_STEPS = 30
MOST_SECONDS = 5


def _meet(hostile: HostileGrammar) -> bool:
    """Whether it was accepted. One that was is followed for some tokens."""
    _, kind, text = hostile
    random = np.random.default_rng(3)
    try:
        follower = compiler().compile(Grammar(kind, text))  # type: ignore[arg-type]
        for _ in range(_STEPS):
            row = follower.tokens().apply(np.zeros(SIZE, np.float32))
            follower.take(int(random.choice(np.flatnonzero(np.isfinite(row)))))
    except DflashError as error:
        assert error.message.startswith("grammar: "), error.message
        assert "\n" not in error.message and len(error.message) < 300
        assert error.usage, error.message
        return False
    return True


def _check(chosen: list[HostileGrammar]) -> int:
    accepted = 0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    for hostile in chosen:
        started = time.thread_time()
        accepted += _meet(hostile)
        assert time.thread_time() - started < MOST_SECONDS, hostile[0]
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10) - before < 2 * MAX_BYTES
    assert _meet(("a good one", "regex", "(ab)*")), "it goes on"
    return accepted


@pytest.mark.parametrize("chosen", [sorted(DAILY), exhaustive([one[0] for one in EVERY])])
def test_hostile_grammars(chosen: list[str]) -> None:
    accepted = _check([one for one in EVERY if one[0] in chosen])
    assert accepted <= (1 if len(chosen) == len(DAILY) else len(EVERY) - 5)

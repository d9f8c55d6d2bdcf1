"""JSON Schema as clients write it, made what llguidance enforces; what it does not do is said.

What can be said in other keywords is; the rest is left out, which allows more, never less.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from urllib.parse import quote, unquote

from dflash_trt.core.strict_json import parse_json
from dflash_trt.errors import DflashError, one_line
from dflash_trt.text.json_patterns import read_pattern

# All others are annotations, as JSON Schema has it of every format.
_FORMATS = frozenset("date date-time duration email hostname ipv4 ipv6 time uri uuid".split())
_DRAFT = re.compile(
    r"https://json-schema\.org/draft/20(19-09|20-12)/schema#?"
    r"|http://json-schema\.org/draft-0[467]/schema#?"
)
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SINGLE = ("items", "additionalItems", "additionalProperties")
_NOT_DONE: dict[str, str | None] = {
    **dict.fromkeys(("uniqueItems", "contains", "unevaluatedItems"), "array"),
    **dict.fromkeys(("propertyNames", "unevaluatedProperties"), "object"),
    **dict.fromkeys(("dependentRequired", "dependentSchemas", "dependencies"), "object"),
    **dict.fromkeys(("not", "if", "$dynamicRef", "$recursiveRef"), None),
}
"""Keywords by the type that they speak of."""
_SILENT = ("type", "title", "description")
_BESIDE = ("minContains", "maxContains", "then", "else", "$dynamicAnchor", "$recursiveAnchor")
_BOUNDS = {"minimum": -1, "exclusiveMinimum": -1, "maximum": 1, "exclusiveMaximum": 1}
_LARGEST = 2**62  # a bound beyond it, as of a float32, is none that a model reaches
_MOST_COMPARED, _DEEPEST = 4096, 8


@dataclass(frozen=True, slots=True)
class Relaxation:
    """A keyword that holds less than it says: where it stands, and how it holds."""

    pointer: str
    how: str = "is not enforced"

    @property
    def keyword(self) -> str:
        return self.pointer.rpartition("/")[2]

    def __str__(self) -> str:
        return one_line(f'"{self.keyword}" at {self.pointer} {self.how}', 300)


@lru_cache(maxsize=256)
def enforce_schema(text: str) -> tuple[str, tuple[Relaxation, ...]]:
    """A schema's text as llguidance takes it, and how it is laxer than what was asked.

    Raises:
        DflashError: it is no JSON object (usage).
    """
    try:
        schema = parse_json(text.encode(), "grammar")
    except DflashError as error:
        raise DflashError(error.what, where="grammar", usage=True) from error
    if not isinstance(schema, dict):
        raise DflashError("a schema must be an object", where="grammar", usage=True)
    reader = _Reader(schema)
    read = reader.read(schema, "")
    reader.read_choices()
    shown = {"enum": []} if read is False else read
    return json.dumps(shown, separators=(",", ":")), tuple(reader.relaxed)


class _Reader:
    """Rewrites a schema in its place."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._root, self._left = root, _MOST_COMPARED
        self._choices: list[tuple[dict[str, Any], str]] = []
        self.relaxed: list[Relaxation] = []

    def read(self, schema: Any, at: str) -> Any:
        """The schema at a JSON pointer, with all in it; False for one that nothing fits."""
        if not isinstance(schema, dict):
            return schema
        if "not" in schema and schema["not"] in ({}, True):
            return False
        self._read_names(schema)
        for name, about in _NOT_DONE.items():
            if name in schema:
                if (about is None or _may_be(schema, about)) and _says_something(name, schema):
                    self.relaxed.append(Relaxation(f"{at}/{name}"))
                del schema[name]
        for name in _BESIDE:
            schema.pop(name, None)
        self._read_values(schema, at)
        self._read_patterns(schema, at)
        if isinstance(schema.get("$ref"), str):
            schema["$ref"] = quote(schema["$ref"], safe="#/%:?&=+,;@!$'()*~")
        if not _DRAFT.fullmatch(str(schema.get("$schema", ""))):
            schema.pop("$schema", None)
        for name, inner, key in _inside(schema):
            inner[key] = self.read(inner[key], f"{at}/{name}")
        if isinstance(schema.get("oneOf"), list):
            self._choices.append((schema, at))
        return schema

    def read_choices(self) -> None:
        """Makes discriminators required, and tells of each oneOf whose branches may overlap."""
        for schema, _ in self._choices:
            told = schema.get("discriminator")
            name = str(told.get("propertyName")) if isinstance(told, dict) else ""
            for branch in map(self._resolve, schema["oneOf"]):
                # It may have a default, which leaves it out of what is required.
                if name in _part(branch, "properties"):
                    branch["required"] = sorted({*_required(branch), name})
        for schema, at in self._choices:
            each = schema["oneOf"]
            pairs = ((one, other) for place, one in enumerate(each) for other in each[:place])
            if not all(self._are_disjoint(*pair) for pair in pairs):
                how = 'is enforced as "anyOf": its branches may overlap'
                self.relaxed.append(Relaxation(f"{at}/oneOf", how))

    def _read_names(self, schema: dict[str, Any]) -> None:
        """Makes propertyNames a patternProperties, where it lists names or has a pattern."""
        names = self._resolve(schema.get("propertyNames"))
        if not isinstance(names, dict) or "patternProperties" in schema:
            return
        told = {key: names[key] for key in names if key not in _SILENT}
        values = told.get("enum", [told["const"]] if "const" in told else None)
        if told and isinstance(values, list):
            pattern = f"^(?:{'|'.join(re.escape(str(one)) for one in values)})$"
        elif {*told} == {"pattern"} and read_pattern(str(told["pattern"]))[0][1:] == []:
            pattern = str(told["pattern"])
        else:
            return
        del schema["propertyNames"]
        schema["patternProperties"] = {pattern: schema.get("additionalProperties", True)}
        schema["additionalProperties"] = False

    def _read_values(self, schema: dict[str, Any], at: str) -> None:
        """Bounds of numbers and of how many properties there are."""
        for name, sign in _BOUNDS.items():
            value = schema.get(name)
            if isinstance(value, int | float) and value * sign > _LARGEST:
                schema[name] = sign * _LARGEST
        if _part(schema, "properties").keys() <= _required(schema):
            return  # which llguidance counts
        for name in ("minProperties", "maxProperties"):
            if schema.pop(name, 0) and _may_be(schema, "object"):
                self.relaxed.append(Relaxation(f"{at}/{name}"))

    def _read_patterns(self, schema: dict[str, Any], at: str) -> None:
        if isinstance(schema.get("pattern"), str):
            kept, left_out = read_pattern(schema.pop("pattern"))
            if left_out and _may_be(schema, "string"):
                how = f"is enforced without {', '.join(left_out)}" if kept else "is not enforced"
                self.relaxed.append(Relaxation(f"{at}/pattern", how))
            if kept:
                # It says in full what a format beside it stands for; both may allow nothing.
                schema.pop("format", None)
                schema["pattern"] = kept[-1]
            if kept[1:]:
                also = [{"pattern": one} for one in kept[:-1]]
                schema["allOf"] = [*_list(schema, "allOf"), *also]
        if str(schema.get("format")) not in _FORMATS:
            schema.pop("format", None)
        patterns = _part(schema, "patternProperties")
        for pattern in [*patterns]:
            (kept, left_out), value = read_pattern(pattern), patterns.pop(pattern)
            if left_out or kept[1:]:
                how = f"is enforced without {pattern}"
                self.relaxed.append(Relaxation(f"{at}/patternProperties", how))
            else:
                patterns[kept[0]] = value

    def _resolve(self, schema: Any) -> Any:
        """What a reference within the schema leads to."""
        for _ in range(_DEEPEST):
            ref = schema.get("$ref") if isinstance(schema, dict) else None
            if not isinstance(ref, str) or not ref.startswith("#"):
                break
            schema = self._root
            for part in unquote(ref).split("/")[1:]:
                schema = _part(schema, part.replace("~1", "/").replace("~0", "~"))
        return schema

    def _are_disjoint(self, one: Any, other: Any, depth: int = 0) -> bool:
        """Whether nothing can be both, as far as is easily seen."""
        self._left -= 1
        one, other = self._resolve(one), self._resolve(other)
        if not (isinstance(one, dict) and isinstance(other, dict)):
            return one is False or other is False
        if self._left < 0 or depth > _DEEPEST:
            return False
        for this, that in ((one, other), (other, one)):
            branches = _list(this, "anyOf") or _list(this, "oneOf")
            if branches and all(self._are_disjoint(each, that, depth + 1) for each in branches):
                return True
        values, others = _values(one), _values(other)
        if values is not None and others is not None:
            return not values & others
        kinds, other_kinds = _kinds(one), _kinds(other)
        if kinds is None or other_kinds is None or not kinds & other_kinds:
            return kinds is not None and other_kinds is not None
        if kinds | other_kinds != {"object"}:
            return False
        mine, theirs = _part(one, "properties"), _part(other, "properties")
        needed, also = _required(one), _required(other)
        return (
            (_is_closed(other) and bool(needed - theirs.keys()))
            or (_is_closed(one) and bool(also - mine.keys()))
            or any(
                self._are_disjoint(mine[name], theirs[name], depth + 1)
                for name in needed & also & mine.keys() & theirs.keys()
            )
        )


def _inside(schema: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """The schemas in one: the way to each, and where it stands."""
    for name in _MAPS:
        for key in [*(inner := _part(schema, name))]:
            yield f"{name}/{_escape(key)}", inner, key
    for name in _LISTS:
        each = _list(schema, name)
        yield from ((f"{name}/{place}", each, place) for place in range(len(each)))
    yield from ((name, schema, name) for name in _SINGLE if name in schema)


def _says_something(name: str, schema: dict[str, Any]) -> bool:
    if name == "if":
        return "then" in schema or "else" in schema
    # Of these two false is what asks for nothing, of a schema it is true.
    return schema[name] not in ((False, {}) if name in ("uniqueItems", "not") else (True, {}))


def _may_be(schema: dict[str, Any], kind: str) -> bool:
    kinds = _kinds(schema)
    return kinds is None or kind in kinds


def _kinds(schema: dict[str, Any]) -> set[str] | None:
    """The types that it allows; an integer is a number."""
    given = schema.get("type")
    given = [given] if isinstance(given, str) else given
    if not isinstance(given, list):
        return None
    return {"number" if one == "integer" else str(one) for one in given}


def _values(schema: dict[str, Any]) -> set[str] | None:
    """The values that it lists, as texts."""
    listed = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if not isinstance(listed, list):
        return None
    plain = (int(one) if isinstance(one, float) and one.is_integer() else one for one in listed)
    return {json.dumps(one, sort_keys=True) for one in plain}


def _is_closed(schema: dict[str, Any]) -> bool:
    return schema.get("additionalProperties") is False and "patternProperties" not in schema


def _part(schema: Any, name: Any) -> dict[str, Any]:
    found = schema.get(name) if isinstance(schema, dict) else None
    return found if isinstance(found, dict) else {}


def _list(schema: Any, name: str) -> list[Any]:
    found = schema.get(name) if isinstance(schema, dict) else None
    return found if isinstance(found, list) else []


def _required(schema: Any) -> set[str]:
    return {one for one in _list(schema, "required") if isinstance(one, str)}


def _escape(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")

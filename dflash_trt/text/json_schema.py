"""JSON Schema as clients write it, made what llguidance enforces; what it does not do is said.

What can be said in other keywords is; the rest is left out, which allows more, never less.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import Any, TypeVar
from urllib.parse import unquote

from dflash_trt.core.strict_json import parse_given
from dflash_trt.errors import DflashError, one_line

# All others are annotations, as JSON Schema has it of every format.
_FORMATS = frozenset("date date-time duration email hostname ipv4 ipv6 time uri uuid".split())
_MAPS = "properties patternProperties $defs definitions".split()
_INNER = "allOf anyOf oneOf prefixItems items additionalItems additionalProperties".split()
_NOT_DONE = (
    "uniqueItems propertyNames contains minContains maxContains if then else not dependencies "
    "dependentRequired dependentSchemas unevaluatedItems unevaluatedProperties "
    "$dynamicRef $dynamicAnchor $recursiveRef $recursiveAnchor"
).split()
_COMPARED = "enum type required".split()
_LARGEST = 2**62  # a bound beyond it, as of a float32, is none that a model reaches
_MOST_COMPARED, _DEEPEST = 20_000, 8
# Patterns that look ahead, of pydantic's Decimal and zod's mail, and the same without.
_SAME = {
    r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$": r"^[+-]?(?:\d+\.?\d*|\.\d+)$",
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]"
    r"@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$": r"^(?:[A-Za-z0-9_'+\-]+\.)*"
    r"[A-Za-z0-9_'+\-]*[A-Za-z0-9_+-]@(?:[A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$",
}
_REPEATS = r"(?:[*+?]|\{\d+,?\d*\})[+?]?"
_PIECE = re.compile(rf"\\.|\[(?:\\.|[^\]\\])*\]?|\(\?<?[=!]|{_REPEATS}|.", re.DOTALL)
_STARTS = re.compile(r"\^([\w-]+)(?![*?{])(?!.*\|)")
_FOREIGN = re.compile(r"\\[1-9k]|\(\?>|\(\?P[=>]")  # references to groups, and atomic ones
T = TypeVar("T")


@lru_cache(maxsize=256)
def enforce_schema(text: str) -> tuple[str, tuple[str, ...]]:
    """A schema's text as llguidance takes it, and what of it is not enforced: keywords and places.

    Raises:
        DflashError: it is no JSON object (usage).
    """
    schema = parse_given(text.encode(), "grammar")
    if not isinstance(schema, dict):
        raise DflashError("a schema must be an object", where="grammar", usage=True)
    reader = _Reader(schema)
    read = reader.read(schema, "")
    return json.dumps({"enum": []} if read is False else read), tuple(reader.relaxed)


class _Reader:
    """Rewrites a schema in its place."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._root, self._left = root, _MOST_COMPARED
        self.relaxed: list[str] = []

    def read(self, schema: Any, at: str) -> Any:
        """The schema at a JSON pointer, with all in it; False for one that nothing fits."""
        if not isinstance(schema, dict):
            return schema
        if "not" in schema and schema["not"] in ({}, True):
            return False
        self._read_names(schema)
        self._read_keys(schema, at)
        self._read_choice(schema, at)
        for name in _NOT_DONE:
            value = schema.pop(name, None)
            if value is True if name == "uniqueItems" else value not in (None, True, {}, []):
                self._relax(name, at)
        self._read_values(schema, at)
        if draft := re.search("draft-0[467]", str(schema.pop("$schema", ""))):
            schema["$schema"] = f"http://json-schema.org/{draft[0]}/schema"
        for key, value in schema.items():
            if key in _MAPS and isinstance(value, dict):
                for name, one in value.items():
                    way = name.replace("~", "~0").replace("/", "~1")
                    value[name] = self.read(one, f"{at}/{key}/{way}")
            elif key in _INNER and isinstance(value, list):
                value[:] = (self.read(one, f"{at}/{key}/{n}") for n, one in enumerate(value))
            elif key in _INNER:
                schema[key] = self.read(value, f"{at}/{key}")
        return schema

    def _read_choice(self, schema: dict[str, Any], at: str) -> None:
        """Makes a oneOf's discriminator required, and tells where branches may overlap."""
        name = str(_get(schema, "discriminator", dict).get("propertyName"))
        each = [self._resolve(one) for one in _get(schema, "oneOf", list)]
        for one in each:
            needed = _get(one, "required", list)
            if name in _get(one, "properties", dict) and name not in needed:  # it has a default
                one["required"] = [*needed, name]
        pairs = ((one, other) for place, one in enumerate(each) for other in each[:place])
        if not all(self._are_disjoint(*pair) for pair in pairs):
            self._relax("oneOf", at, 'is enforced as "anyOf": its branches may overlap')

    def _relax(self, name: str, at: str, how: str = "is not enforced") -> None:
        self.relaxed.append(one_line(f'"{name}" at {at}/{name} {how}', 300))

    def _read_names(self, schema: dict[str, Any]) -> None:
        """Makes propertyNames a patternProperties, where it lists names or has a pattern."""
        names = self._resolve(schema.get("propertyNames"))
        told = {*names} - {"type", "title", "description"} if isinstance(names, dict) else {"?"}
        kept, left_out = list[str](), list[str]()
        if told == {"enum"}:
            kept = [f"^(?:{'|'.join(re.escape(str(one)) for one in _get(names, 'enum', list))})$"]
        elif told == {"pattern"}:
            kept, left_out = read_pattern(str(names["pattern"]))
        # Beside properties it would speak of them too.
        is_one = len(kept) == 1 and not left_out
        if is_one and not schema.keys() & {"properties", "patternProperties"}:
            schema["patternProperties"] = {kept[0]: schema.get("additionalProperties", True)}
            schema["additionalProperties"], schema["propertyNames"] = False, True
        elif not told:
            del schema["propertyNames"]

    def _read_keys(self, schema: dict[str, Any], at: str) -> None:
        """Says patternProperties in what llguidance reads, or lets them go where it cannot."""
        given = _get(schema, "patternProperties", dict)
        read = [read_pattern(name) for name in given]
        starts = [found[1] if (found := _STARTS.match(name)) else "" for name in given]
        apart = all(
            not one.startswith(other) and not other.startswith(one)
            for place, one in enumerate(starts)
            for other in starts[:place]
        )
        if apart and all(len(kept) == 1 and not left_out for kept, left_out in read):
            names = [kept[0] for kept, _ in read]
            given |= dict(zip(names, [given.pop(name) for name in [*given]], strict=True))
            return
        self._relax("patternProperties", at)
        for name in ("patternProperties", "additionalProperties"):  # whose names it cannot tell
            schema.pop(name, None)

    def _read_values(self, schema: dict[str, Any], at: str) -> None:
        """Bounds, patterns and formats."""
        for name in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"):
            value = schema.get(name)
            if isinstance(value, int | float) and abs(value) > _LARGEST:
                schema[name] = _LARGEST if value > 0 else -_LARGEST
        if {*_get(schema, "properties", dict)} - _required(schema):  # else llguidance counts
            for name in ("minProperties", "maxProperties"):
                if schema.pop(name, 0):
                    self._relax(name, at)
        if isinstance(schema.get("pattern"), str):
            kept, left_out = read_pattern(schema.pop("pattern"))
            if left_out:
                without = f"is enforced without {', '.join(left_out)}"
                self._relax("pattern", at, without if kept else "is not enforced")
            if not left_out:
                # It says in full what a format beside it stands for; both may allow nothing.
                schema.pop("format", None)
            if kept:
                *also, schema["pattern"] = kept
                if also:
                    schema["allOf"] = _get(schema, "allOf", list) + [
                        {"pattern": one} for one in also
                    ]
        if str(schema.get("format")) not in _FORMATS:
            schema.pop("format", None)

    def _resolve(self, schema: Any) -> Any:
        """What a reference within the schema leads to."""
        for _ in range(_DEEPEST):
            ref = schema.get("$ref") if isinstance(schema, dict) else None
            if not isinstance(ref, str) or not ref.startswith("#"):
                break
            schema = self._root
            for part in unquote(ref).split("/")[1:]:
                schema = _get(schema, part.replace("~1", "/").replace("~0", "~"), dict)
        return schema

    def _are_disjoint(self, one: Any, other: Any, depth: int = 0) -> bool:
        """Whether nothing can be both, as far as is easily seen."""
        one, other = self._resolve(one), self._resolve(other)
        lists = (_get(each, name, list) for each in (one, other) for name in _COMPARED)
        self._left -= 1 + sum(map(len, lists))
        if self._left < 0 or depth > _DEEPEST:
            return False
        values, others = _values(one), _values(other)
        if values and others:
            return not values & others
        kinds, also = _kinds(one), _kinds(other)
        if kinds and also and not kinds & also:
            return True
        if kinds | also != {"object"}:
            return False
        mine, theirs = _get(one, "properties", dict), _get(other, "properties", dict)
        return any(
            self._are_disjoint(mine[name], theirs[name], depth + 1)
            for name in _required(one) & _required(other)
            if name in mine and name in theirs
        )


def read_pattern(pattern: str) -> tuple[list[str], list[str]]:
    """Expressions that a text must match all of, and what of the pattern they leave out.

    llguidance looks neither ahead nor behind: what an anchored pattern looks ahead for at its
    beginning is an expression of its own. No expression where nothing can be kept.
    """
    pattern = _SAME.get(pattern, pattern).replace(r"\Z", "$")
    if _FOREIGN.search(pattern.replace(r"\\", "")):
        return [], [pattern]
    kept, heads, left_out, depth, is_choice = "", list[str](), list[str](), 0, False
    look: tuple[int, int] | None = None  # where it begins, and how deep
    ended = -1
    for found in _PIECE.finditer(pattern):
        piece = found[0]
        if look is None and len(piece) > 2 and piece[0] == "(":
            look = found.start(), depth
        depth += (piece[0] == "(") - (piece == ")")
        if look is None and piece in (r"\b", r"\B"):
            left_out.append(piece)
        elif look is None and ended == found.start() and re.fullmatch(_REPEATS, piece):
            continue  # of what was left out
        elif look is None:
            is_choice |= piece == "|" and depth == 0
            kept += piece
        elif depth == look[1]:
            group = pattern[look[0] : found.end()]
            (heads if kept == "^" and group.startswith("(?=") else left_out).append(group)
            look, ended = None, found.end()
    if is_choice:
        heads, left_out = [], heads + left_out
    each = [read_pattern(f"^(?:{head[3:]}") for head in heads]
    left_out += [one for _, without in each for one in without]
    return [*(one for also, _ in each for one in also), kept], left_out


def _kinds(schema: Any) -> set[str]:
    """The types that it names; an integer is a number."""
    given = schema.get("type") if isinstance(schema, dict) else None
    each = [given] if isinstance(given, str) else _get(schema, "type", list)
    return {"number" if one == "integer" else str(one) for one in each}


def _values(schema: Any) -> set[str]:
    """The values that it lists, as texts."""
    is_one = isinstance(schema, dict) and "const" in schema
    listed = [schema["const"]] if is_one else _get(schema, "enum", list)
    return {json.dumps(one, sort_keys=True) for one in listed}


def _required(schema: Any) -> set[str]:
    return {one for one in _get(schema, "required", list) if isinstance(one, str)}


def _get(schema: Any, name: str, kind: type[T]) -> T:
    """What stands there if it is of that kind, else nothing of it."""
    found = schema.get(name) if isinstance(schema, dict) else None
    return found if isinstance(found, kind) else kind()

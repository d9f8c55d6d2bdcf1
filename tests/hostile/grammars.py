"""Grammars made to hang, to take memory, to break: expressions, schemas, what is none."""

from __future__ import annotations

import json
from typing import Any

HostileGrammar = tuple[str, str, str]
"""What is hostile, a kind of grammar, and its text."""

_EXPRESSIONS = {
    "a product of repeats": "(a{1000}){1000}",
    "repeats that nest": "(" * 60 + "a" + "+)+" * 60,
    "what backtracks": "(x+x+)+y",
    "classes without case": "(?i)[\\p{L}]{2000}x(?i)[\\p{L}]{2000}",
    "ten thousand alternatives": "|".join(f"word{one}" for one in range(6000)),
    "a lookahead": "(?=a)b",
    "a back reference": "(a+)\\1",
    "an escape of no character": "\\x{110000}",
}


def _branches(levels: int) -> Any:
    definitions: dict[str, Any] = {
        f"d{one}": {"anyOf": [{"$ref": f"#/$defs/d{one + 1}"}] * 2} for one in range(levels)
    }
    definitions[f"d{levels}"] = {"type": "null"}
    return {"$defs": definitions, "$ref": "#/$defs/d0"}


_SCHEMAS: dict[str, Any] = {
    "a large divisor": {"multipleOf": 999983},
    "bounds of many digits": {"type": "number", "minimum": 1e-300, "maximum": 1.0000000001e-300},
    "a text of a length": {"type": "string", "minLength": 30_000, "maxLength": 60_000},
    "unique items": {"type": "array", "items": {"enum": [*range(3000)]}, "uniqueItems": True},
    "a reference to itself": {"$ref": "#"},
    "references in a ring": {
        "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
        "$ref": "#/$defs/a",
    },
    "a tree that must not end": {
        "type": "object",
        "properties": {"next": {"$ref": "#"}},
        "required": ["next"],
    },
    "a reference to the net": {"$ref": "http://127.0.0.1:1/x.json"},
    "branches that double": _branches(60),
    "any of many": {"anyOf": [{"const": f"x{one}"} for one in range(3500)]},
    "a pattern that doubles states": {"type": "string", "pattern": "^(a|b)*a(a|b){30}$"},
    "names by patterns": {
        "type": "object",
        "patternProperties": {f".*{one}.*": {"type": "integer"} for one in range(150)},
    },
}
_TEXTS = {
    "brackets": "[" * 60_000,
    "arrays in arrays": '{"items":' * 6000 + "true" + "}" * 6000,
    "objects in objects": '{"properties":{"a":' * 1500 + "true" + "}}" * 1500,
    "no JSON": "\0" * 100,
    "the same name again": '{"type":"object",' + '"type":"string",' * 3000 + '"title":"x"}',
}


def hostile_grammars() -> list[HostileGrammar]:
    """All of them, always in the same order."""
    return [
        *((about, "regex", text) for about, text in _EXPRESSIONS.items()),
        *((about, "json_schema", json.dumps(one)) for about, one in _SCHEMAS.items()),
        *((about, "json_schema", text) for about, text in _TEXTS.items()),
    ]

"""More than 200 JSON schemas, of which all but `OPEN` bound the length of what they allow."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

VALUES: dict[str, Schema] = {
    "null": {"type": "null"},
    "boolean": {"type": "boolean"},
    "const text": {"const": 'a "quoted" text, with é and \n'},
    "const number": {"const": -12.5},
    "const object": {"const": {"a": [1, None, {"b": True}]}},
    "const array": {"const": [[], {}, ""]},
    "enum of texts": {"enum": ["red", "redder", "reddest", ""]},
    "enum of all": {"enum": [None, True, 0, "0", [0], {"0": 0}]},
    "enum of a type": {"type": "string", "enum": ["ok", "lost", 5]},
    "digit": {"type": "integer", "minimum": 0, "maximum": 9},
    "range": {"type": "integer", "minimum": -17, "maximum": 1234},
    "negative range": {"type": "integer", "minimum": -300, "maximum": -5},
    "open range": {"type": "integer", "exclusiveMinimum": 9, "exclusiveMaximum": 12},
    "one number": {"type": "integer", "minimum": 77, "maximum": 77},
    "even": {"type": "integer", "minimum": 0, "maximum": 100, "multipleOf": 2},
    "sevens": {"type": "integer", "minimum": 0, "maximum": 999, "multipleOf": 7},
    "short text": {"type": "string", "maxLength": 5},
    "no text": {"type": "string", "maxLength": 0},
    "text of a length": {"type": "string", "minLength": 4, "maxLength": 4},
    "plate": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3,4}$", "maxLength": 7},
    "words": {"type": "string", "pattern": "^(red|wet)( fox| cat){0,2}$", "maxLength": 11},
    "hex": {"type": "string", "pattern": "^#[0-9a-f]{6}$", "maxLength": 7},
    "holds an a": {"type": "string", "pattern": "a", "maxLength": 8},
    "date": {"type": "string", "format": "date"},
    "ipv4": {"type": "string", "format": "ipv4"},
    "uuid": {"type": "string", "format": "uuid"},
    "two types": {"type": ["boolean", "null"]},
    "any of": {"anyOf": [{"type": "boolean"}, {"type": "string", "maxLength": 3}]},
    "one of": {"oneOf": [{"type": "null"}, {"type": "integer", "minimum": 1, "maximum": 3}]},
    "all of": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 12}]},
    "pair": {
        "type": "array",
        "prefixItems": [{"type": "boolean"}, {"enum": ["x", "y"]}],
        "items": False,
        "minItems": 2,
    },
    "empty list": {"type": "array", "maxItems": 0},
    "empty object": {"type": "object", "additionalProperties": False},
}
"""All of a bounded length."""

OPEN: dict[str, Schema] = {
    "any text": {"type": "string"},
    "any integer": {"type": "integer"},
    "any number": {"type": "number", "minimum": 0},
    "any list": {"type": "array", "items": {"type": "boolean"}},
    "any object": {"type": "object"},
    "a map": {"type": "object", "additionalProperties": {"type": "integer", "minimum": 0}},
    "a time": {"type": "string", "format": "date-time"},
    "an address": {"type": "string", "format": "email"},
    "a tree": {
        "type": "object",
        "properties": {"left": {"$ref": "#"}, "right": {"$ref": "#"}, "at": {"type": "boolean"}},
        "required": ["at"],
        "additionalProperties": False,
    },
    "a linked list": {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
                },
                "required": ["next"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/node",
    },
    "text or list": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"$ref": "#"}}]},
    "at least two": {"type": "array", "items": {"type": "null"}, "minItems": 2},
}
"""Of no bounded length."""


def _object(required: tuple[str, ...], **properties: Schema) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def all_schemas() -> dict[str, Schema]:
    """By name: `VALUES`, the same in lists and objects, by reference, or null; and `OPEN`."""
    found = {**VALUES, **OPEN}
    others = list(VALUES.values())
    for at, (name, one) in enumerate(VALUES.items()):
        other = others[(at * 7 + 3) % len(others)]
        found |= {
            f"up to two of {name}": {"type": "array", "items": one, "maxItems": 2},
            f"three of {name}": {"type": "array", "items": one, "minItems": 3, "maxItems": 3},
            f"object of {name}": _object(("value",), value=one),
            f"object of {name} and more": _object(("name",), name=other, value=one, end=one),
            f"{name} by reference": {
                "$defs": {"one": one},
                **_object(("a",), a={"$ref": "#/$defs/one"}, b={"$ref": "#/$defs/one"}),
            },
            f"{name} or none": _object(("value",), value={"anyOf": [one, {"type": "null"}]}),
        }
    return found

"""What an answer must follow: OpenAI's `response_format`, and vLLM's fields for the same."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from dflash_trt.core.strict_json import quoted
from dflash_trt.errors import DflashError
from dflash_trt.serving.openai.errors import ApiError
from dflash_trt.serving.openai.prompts import check_text
from dflash_trt.text.grammar import Grammar, lark_choice, schema_text

FORMAT, GUIDES = "response_format", "structured_outputs"
_KINDS = ("json", "json_object", "regex", "choice", "grammar")
FIELDS = frozenset({FORMAT, GUIDES, *(f"guided_{kind}" for kind in _KINDS)})


def read_structure(fields: Mapping[str, Any]) -> Grammar | None:
    """The grammar that a request's fields ask for; None for any text.

    Raises:
        ApiError: one of them is wrong, or two of them ask for something.
    """
    given = [(name, grammar) for name, grammar in _read_all(fields) if grammar is not None]
    if len(given) > 1:
        (first, _), (second, _), *_ = given
        raise ApiError(f"does not go with {first}", param=second)
    return given[0][1] if given else None


def _read_all(fields: Mapping[str, Any]) -> Iterator[tuple[str, Grammar | None]]:
    if FORMAT in fields:
        yield FORMAT, _read_format(fields[FORMAT])
    for kind in _KINDS:
        name = f"guided_{kind}"
        if name in fields:
            yield name, _read_guide(kind, fields[name], name)
    if GUIDES in fields:
        guides = fields[GUIDES]
        if not isinstance(guides, dict):
            raise ApiError("must be an object", param=GUIDES)
        for kind, value in guides.items():
            name = f"{GUIDES}.{quoted(kind).strip(chr(34))}"
            if kind not in _KINDS and value is not None:
                raise ApiError("this parameter is not supported", param=name)
            if value is not None:
                yield name, _read_guide(kind, value, name)


def _read_format(given: Any) -> Grammar | None:
    """What `response_format` makes of the answer: any text, a JSON object, or a schema's."""
    if not isinstance(given, dict):
        raise ApiError("must be an object with a type", param=FORMAT)
    kind = given.get("type")
    if kind == "text" and given.keys() == {"type"}:
        return None
    if kind == "json_object" and given.keys() == {"type"}:
        return Grammar("json_object")
    if kind != "json_schema" or given.keys() != {"type", "json_schema"}:
        raise ApiError(f"{quoted(given)} is not supported", param=FORMAT)
    where, wrapped = f"{FORMAT}.json_schema", given["json_schema"]
    if not isinstance(wrapped, dict) or not isinstance(wrapped.get("schema"), dict):
        raise ApiError("must have a schema, an object", param=where)
    unknown = wrapped.keys() - {"name", "description", "schema", "strict"}
    if unknown:
        name = quoted(min(unknown)).strip('"')
        raise ApiError("this parameter is not supported", param=f"{where}.{name}")
    return _make("json_schema", schema_text(wrapped["schema"]), f"{where}.schema")


def _read_guide(kind: str, value: Any, where: str) -> Grammar | None:
    """One of vLLM's: a schema as an object or its text, an expression, texts, or rules."""
    if kind == "json_object":
        if not isinstance(value, bool):
            raise ApiError(f"must be true or false, not {quoted(value)}", param=where)
        return Grammar("json_object") if value else None
    if kind == "choice":
        if not isinstance(value, list):
            raise ApiError("must be a list of texts", param=where)
        for place, one in enumerate(value):
            check_text(one, f"{where}[{place}]")
        grammar = _make("choice", json.dumps(value), where)
        try:
            lark_choice(grammar.text)
        except DflashError as error:
            raise ApiError(error.what, param=where) from error
        return grammar
    if kind == "json":
        text = value if isinstance(value, str) else schema_text(value)
        return _make("json_schema", check_text(text, where), where)
    return _make("regex" if kind == "regex" else "grammar", check_text(value, where), where)


def _make(kind: Any, text: str, where: str) -> Grammar:
    try:
        return Grammar(kind, text)
    except DflashError as error:
        raise ApiError(error.what, param=where) from error

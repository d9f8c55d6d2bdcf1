"""What an answer must follow: OpenAI's `response_format`, and vLLM's `structured_outputs`."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from dflash_trt.errors import DflashError
from dflash_trt.serving.openai.body import Body, Text, check_unicode
from dflash_trt.serving.openai.errors import ApiError
from dflash_trt.text.grammar import MOST_CHARACTERS, Grammar, lark_choice, schema_text
from dflash_trt.text.json_schema import enforce_schema
from dflash_trt.text.tools import ToolUse

MOST_WARNINGS = 16


def _check_schema(schema: Any) -> Any:
    """Raises ValueError for a text that is no schema's; what is none is told when it compiles."""
    if schema == "":
        raise ValueError("must not be empty")
    return check_unicode(schema) if isinstance(schema, str) else schema


class _Wrapped(Body):
    name: Any = None
    description: Any = None
    strict: Any = None
    schema_: dict[str, Any] = Field(alias="schema")


class _SchemaFormat(Body):
    type: Literal["json_schema"]
    json_schema: _Wrapped


class _PlainFormat(Body):
    type: Literal["text", "json_object"]


class _Guides(Body):
    json_: Annotated[Any, AfterValidator(_check_schema)] = Field(None, alias="json")
    json_object: bool = False
    regex: Text | None = None
    choice: list[Text] | None = None
    grammar: Text | None = None


class StructuredBody(Body):
    """The fields that bind an answer."""

    response_format: Annotated[_PlainFormat | _SchemaFormat, Field(discriminator="type")] | None = (
        None
    )
    structured_outputs: _Guides | None = None


def read_structure(body: StructuredBody) -> Grammar | None:
    """The grammar that a request's fields ask for; None for any text."""
    given: list[tuple[str, Any, Any]] = []
    match body.response_format:
        case _PlainFormat(type="json_object"):
            given.append(("response_format", "json_object", True))
        case _SchemaFormat(json_schema=wrapped):
            given.append(("response_format.json_schema.schema", "json", wrapped.schema_))
    for name, value in body.structured_outputs or ():
        kind = name.rstrip("_")
        given.append((f"structured_outputs.{kind}", kind, value))
    asked = [one for one in given if one[2] is not None and one[1:] != ("json_object", False)]
    if len(asked) > 1:
        raise ApiError(f"does not go with {asked[0][0].split('.')[0]}", param=asked[1][0])
    for where, kind, value in asked:
        try:
            if kind == "json":
                text = value if isinstance(value, str) else schema_text(value)
                return Grammar("json_schema", text)
            if kind == "choice":
                lark_choice(json.dumps(value))
                return Grammar(kind, json.dumps(value))
            return Grammar(kind, "" if kind == "json_object" else value)
        except DflashError as error:
            raise ApiError(error.what, param=where) from error
    return None


def find_warnings(body: StructuredBody, use: ToolUse | None) -> tuple[str, ...]:
    """What of a request's schemas is not enforced: of its format, and of functions it binds.

    Raises:
        ApiError: the schema or its function is `strict`, which allows nothing of it.
    """
    bound: list[tuple[str, Any, bool]] = []
    if isinstance(body.response_format, _SchemaFormat):
        form = body.response_format.json_schema
        bound.append(("response_format.json_schema.schema", form.schema_, form.strict is True))
    if body.structured_outputs is not None:
        bound.append(("structured_outputs.json", body.structured_outputs.json_, False))
    for place, one in enumerate(() if use is None else use.tools):
        if use is not None and one in use.callable and (use.must or one.strict):
            bound.append((f"tools[{place}].function.parameters", one.schema, one.strict))
    warnings: list[str] = []
    for where, schema, is_strict in bound:
        text = schema if isinstance(schema, str) else schema_text(schema)
        try:
            _, relaxed = enforce_schema(text[: MOST_CHARACTERS + 1])
        except DflashError:
            continue  # which is told when it compiles
        if is_strict and relaxed:
            raise ApiError(f'{relaxed[0]}, and "strict" asks for all of it', param=where)
        warnings += (f"{where}: {one}" for one in relaxed)
    return tuple(warnings[:MOST_WARNINGS])

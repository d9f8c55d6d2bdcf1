"""Bodies of requests: bounded in bytes, values and time; mistakes name their parameter."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, Field, ValidationError, model_validator
from starlette.requests import Request

from dflash_trt.core.strict_json import parse_json, quoted
from dflash_trt.core.validation import StrictRecord
from dflash_trt.serving.openai.errors import ApiError

MAX_BODY_BYTES = 16 << 20
MAX_HELD_BYTES = 64 << 20
"""Of all bodies that are in memory at a time."""
MAX_VALUES = 100_000
BODY_S = 60.0
_SMALL_BYTES = 16 << 10  # read in the event loop, in milliseconds whatever they hold
_UNKNOWN = "extra_forbidden"
# pydantic speaks of Python's types, its clients of JSON's.
_WORDS = {
    "model_type": "an object",
    "model_attributes_type": "an object",
    "dict_type": "an object",
    "list_type": "a list",
    "string_type": "a text",
    "bool_type": "true or false",
    "int_type": "an integer",
    "float_type": "a number",
}
# OpenAI's names of mistakes, which clients tell apart.
_CODES = {_UNKNOWN: "unknown_parameter", "missing": "missing_required_parameter"}

T = TypeVar("T")
Kind = TypeVar("Kind", bound="Body")


class BodyReader:
    """Reads the bodies of all requests of a front; large ones beside the event loop."""

    def __init__(self) -> None:
        self._held = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="request-body")

    async def read(self, request: Request, understand: Callable[[Any], T]) -> T:
        """What `understand` makes of the body's JSON value.

        Raises:
            ApiError: a body too large, too slow, or one too many (413, 408, 503), or not JSON.
        """
        body = bytearray()

        def parse() -> T:
            return understand(parse_json(bytes(body), "body", MAX_VALUES))

        try:
            async with asyncio.timeout(BODY_S):
                async for chunk in request.stream():
                    if len(body) + len(chunk) > MAX_BODY_BYTES:
                        what = f"the body is larger than {MAX_BODY_BYTES >> 20} MiB"
                        raise ApiError(what, status=413)
                    if self._held + len(chunk) > MAX_HELD_BYTES:
                        raise ApiError("too many large requests are being read", status=503)
                    self._held += len(chunk)
                    body += chunk
            if len(body) <= _SMALL_BYTES:
                return parse()
            return await asyncio.get_running_loop().run_in_executor(self._thread, parse)
        except TimeoutError:
            raise ApiError("the body came too slowly", status=408) from None
        finally:
            self._held -= len(body)


class Body(StrictRecord):
    """A JSON object of known fields alone; null is as good as absent.

    So are an unknown field's false, zero and whatever is empty: they ask for nothing.
    """

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, raw: Any) -> Any:
        if not isinstance(raw, dict):
            return raw
        known = {one.alias or name for name, one in cls.model_fields.items()}
        return {
            name: value
            for name, value in raw.items()
            if value is not None and (name in known or value)
        }


def check_unicode(text: str) -> str:
    """Raises ValueError for a text that no tokenizer takes, as JSON's \\ud800."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"is not Unicode text at character {error.start}") from None
    return text


AnyText = Annotated[str, AfterValidator(check_unicode)]
Text = Annotated[AnyText, Field(min_length=1)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Count = Annotated[int, Field(ge=1)]


def read_body(kind: type[Kind], raw: Any, defaults: Mapping[str, Any] | None = None) -> Kind:
    """Reads a request's JSON value; `defaults` by field stand where it has none, or null."""
    if not isinstance(raw, dict):
        raise ApiError("the body must be a JSON object")
    for name, value in (defaults or {}).items():
        if name in kind.model_fields and raw.get(name) is None:
            raw = {**raw, name: value}
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        found = error.errors(include_url=False)
        first = min(found, key=lambda one: one["type"] != _UNKNOWN or len(one["loc"]) > 1)
        mistake = first["type"]
        code = "invalid_type" if mistake in _WORDS else _CODES.get(mistake)
        raise ApiError(_describe(first), param=_name(raw, first), code=code) from None


def _describe(mistake: Any) -> str:
    kind, what = mistake["type"], str(mistake["msg"])
    if kind in _WORDS:
        return f"must be {_WORDS[kind]}, not {quoted(mistake['input'])}"
    if kind == _UNKNOWN:
        return "this parameter is not supported"
    if kind == "too_short":
        return "must not be empty"
    what = what.removeprefix("Value error, ").removeprefix("Input ").removeprefix("Field ")
    is_compared = kind == "literal_error" or kind.endswith("_equal")
    return f"{what}, not {quoted(mistake['input'])}" if is_compared else what


def _name(raw: Any, mistake: Any) -> str:
    """The parameter, as `messages[1].content`; pydantic's location has tags of unions too."""
    name, reached, kind = "", raw, mistake["type"]
    location: tuple[str | int, ...] = mistake["loc"]
    for place, part in enumerate(location):
        is_last = place == len(location) - 1
        if isinstance(part, int) and isinstance(reached, list):
            name, reached = f"{name}[{part}]", reached[part]
        elif isinstance(reached, dict) and (part in reached or (is_last and kind == "missing")):
            shown = quoted(part).strip('"')
            name, reached = f"{name}.{shown}" if name else shown, reached.get(part)
    if kind.startswith("union_tag"):  # the field that tells which of a union is meant
        name += "." + mistake["ctx"]["discriminator"].strip("'")
    return name

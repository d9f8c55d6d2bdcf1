"""The base of all request bodies, and their mistakes as errors that name the parameter."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, Field, ValidationError, model_validator

from dflash_trt.core.strict_json import quoted
from dflash_trt.core.validation import StrictRecord
from dflash_trt.errors import DflashError
from dflash_trt.serving.openai.errors import ApiError

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

Kind = TypeVar("Kind", bound="Body")


class Body(StrictRecord):
    """A JSON object of known fields alone; null is as good as absent."""

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, raw: Any) -> Any:
        if not isinstance(raw, dict):
            return raw
        return {name: value for name, value in raw.items() if value is not None}


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


def read_body(kind: type[Kind], raw: Any) -> Kind:
    """Reads a request's JSON value.

    Raises:
        ApiError: names the first parameter that is not known, else the first that is wrong.
    """
    if not isinstance(raw, dict):
        raise ApiError("the body must be a JSON object")
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        found = error.errors(include_url=False)
        first = min(found, key=lambda one: one["type"] != _UNKNOWN or len(one["loc"]) > 1)
        raise ApiError(_describe(first), param=_name(raw, first)) from None


def as_refusal(error: DflashError, **renamed: str) -> ApiError:
    """A refusal of one of the project's own records; `renamed` gives parameters by its names."""
    where = error.where or ""
    return ApiError(error.what, param=renamed.get(where, where) or None)


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

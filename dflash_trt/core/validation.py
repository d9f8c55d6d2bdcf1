"""Records on disk, checked against a model: all that is wrong with one is told in one line."""

from __future__ import annotations

import difflib
import reprlib
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from dflash_trt.core.files import FileKind
from dflash_trt.core.strict_json import read_json_object
from dflash_trt.errors import DflashError, nearest, one_line

Record = TypeVar("Record", bound=BaseModel)
Location = tuple[str | int, ...]
"""Where pydantic saw a mistake: keys, positions in lists, and tags of unions."""

MAX_LINE, MAX_SHOWN = 340, 6
"""Characters for all mistakes, and the most that are told with more than their keys."""

_MOST_COMPARED = 50
"""Unknown keys that are compared with the known ones, a millisecond each; a file may have many."""

_UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")
"""What pydantic calls a key that a model or a dataclass does not have."""


class StrictRecord(BaseModel):
    """A record of known keys alone, whose values have exactly the types that it says."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


def _describe_unknown(key: str, location: Location, known: list[str]) -> str:
    """What to say of a key that `known` lacks."""
    return f"unknown key {key!r}{nearest(str(location[-1]), known)}"


def validate(
    kind: type[Record],
    raw: Mapping[str, Any],
    where: str | Path,
    *,
    fix: str | None = None,
    usage: bool = False,
    unknown: Callable[[str, Location, list[str]], str] = _describe_unknown,
    more: Mapping[str, str] | None = None,
) -> Record:
    """`raw` as a `kind`; `unknown` words a key that is not known.

    Raises:
        DflashError: says every mistake, those in keys' names first, `more` by key last.
    """
    further = {key: f"{key}: {what}" for key, what in (more or {}).items()}
    try:
        record = kind.model_validate(raw)
    except ValidationError as error:
        what = _on_one_line(_mistakes(error, kind, unknown) | further)
        raise DflashError(what, where=where, fix=fix, usage=usage) from error
    if further:
        raise DflashError(_on_one_line(further), where=where, fix=fix, usage=usage)
    return record


def check_value(name: str, value: object, kind: Any) -> None:
    """Raises DflashError (usage) unless `value`, an argument called `name`, is of type `kind`."""
    try:
        _adapter(kind).validate_python(value, strict=True)
    except ValidationError as error:
        raise DflashError(_describe("", error.errors()[0]), where=name, usage=True) from error


@cache  # to make one takes a hundred times as long as to use it
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def read_record(
    path: Path,
    kind: type[Record],
    schema_version: int,
    fix: str,
    *,
    file_kind: FileKind = FileKind.CONFIG,
    usage: bool = False,
) -> Record:
    """The `kind` in the file `path`; `fix` is what an error advises.

    With `usage` it is a file that the user named, and a bad one is wrong usage.

    Raises:
        DflashError: unreadable, another schema version, or fields that do not fit.
    """
    raw = read_json_object(path, file_kind, named=usage)
    version = raw.get("schema_version")
    if version != schema_version:
        raise DflashError(
            f"has schema version {one_line(version, 40)}, this version reads {schema_version}",
            where=path,
            fix=fix,
            usage=usage,
        )
    return validate(kind, raw, path, fix=fix, usage=usage)


def known_keys(kind: type[Any], location: Location) -> list[str]:
    """The keys of what `kind` has at `location`."""
    return [name for one in _follow(kind, location)[1] for name in _fields(one)]


def _mistakes(
    error: ValidationError, kind: type[Any], unknown: Callable[[str, Location, list[str]], str]
) -> dict[str, str]:
    """What is wrong, by key."""
    found: dict[str, str] = {}
    misspelt: set[str] = set()
    for one in sorted(error.errors(include_url=False), key=lambda one: one["type"] not in _UNKNOWN):
        location = one["loc"]
        if one["type"] in _UNKNOWN:
            if len(found) >= _MOST_COMPARED:
                found[".".join(map(str, location))] = "unknown"
                continue
            outer, name = _follow(kind, location[:-1])[0], str(location[-1])
            known = known_keys(kind, location[:-1])
            key = ".".join([*outer, name])
            found[key] = unknown(one_line(key, 100), location, known)
            close = difflib.get_close_matches(name[:100], known, n=1, cutoff=0.4)
            misspelt.update(".".join([*outer, meant]) for meant in close)
            continue
        key = ".".join(_follow(kind, location)[0])
        if one["type"] == "too_short" and any(name.startswith(f"{key}.") for name in found):
            continue  # pydantic does not count an item that has a mistake
        # What is misspelt is missing under its own name too, and one of a union fails as each.
        if key not in found and not (one["type"] == "missing" and key in misspelt):
            found[key] = _describe(key, one)
    return found


def _on_one_line(mistakes: Mapping[str, str]) -> str:
    """All mistakes; those that there is no room for by their keys."""
    room = max(MAX_LINE // len(mistakes), MAX_LINE // MAX_SHOWN)
    parts = [one_line(what, min(room, 300)) for what in list(mistakes.values())[:MAX_SHOWN]]
    if len(mistakes) > MAX_SHOWN:
        more = one_line(", ".join(list(mistakes)[MAX_SHOWN:]), 80)
        parts.append(f"and {len(mistakes) - MAX_SHOWN} more: {more}")
    return parts[0] if len(parts) == 1 else f"{len(mistakes)} errors: {'; '.join(parts)}"


def _describe(key: str, error: Mapping[str, Any]) -> str:
    if error["type"] == "missing":
        return f"{key} is missing, a required key"
    what = str(error["msg"]).removeprefix("Value error, ")
    if error["type"] != "value_error":  # which says itself what does not go together
        what += f", got {one_line(reprlib.repr(error['input']), 60)}"
    return f"{key}: {what}" if key else what


def _follow(kind: type[Any], location: Location) -> tuple[list[str], list[Any]]:
    """The keys and positions of `location`, and the types that may be there."""
    path: list[str] = []
    reached = [kind]
    for part in location:
        found = [one for alternative in reached for one in _alternatives(alternative)]
        inner = [child for one in found for child in _inside(one, part)]
        if inner:
            path.append(str(part))
            reached = inner
        else:  # pydantic says which of a union it means
            reached = [one for one in found if part in _tags(one)] or found
    return path, [one for alternative in reached for one in _alternatives(alternative)]


def _alternatives(annotation: Any) -> Iterator[Any]:
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from _alternatives(get_args(annotation)[0])
    elif origin in (Union, types.UnionType):
        for one in get_args(annotation):
            yield from _alternatives(one)
    else:
        yield annotation


def _inside(annotation: Any, part: str | int) -> Sequence[Any]:
    """The types that an `annotation` has at a key or position."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return arguments[1:]
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return [one for one in arguments if one is not Ellipsis] if isinstance(part, int) else []
    known = _fields(annotation)
    return [known[str(part)]] if part in known else []


def _fields(annotation: Any) -> dict[str, Any]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return {name: field.annotation for name, field in annotation.model_fields.items()}
    if not (isinstance(annotation, type) and is_dataclass(annotation)):
        return {}
    hints = get_type_hints(annotation)
    return {field.name: hints[field.name] for field in fields(annotation)}


def _tags(annotation: Any) -> set[Any]:
    """What pydantic may call one of a union: its name, or the value that discriminates it."""
    literals = {value for one in _fields(annotation).values() for value in get_args(one)}
    return {getattr(annotation, "__name__", None), *(x for x in literals if isinstance(x, str))}

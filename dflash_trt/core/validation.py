"""Records on disk, checked against a model: all that is wrong with one is told in one line."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

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
        what = _on_one_line(_mistakes(error, kind, raw, unknown) | further)
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
        what = f"has schema version {one_line(version, 40)}, this version reads {schema_version}"
        raise DflashError(what, where=path, fix=fix, usage=usage)
    return validate(kind, raw, path, fix=fix, usage=usage)


def _mistakes(
    error: ValidationError,
    kind: type[BaseModel],
    raw: Any,
    unknown: Callable[[str, Location, list[str]], str],
) -> dict[str, str]:
    found: dict[str, str] = {}
    misspelt: set[str] = set()
    for one in sorted(error.errors(include_url=False), key=lambda one: one["type"] not in _UNKNOWN):
        location = one["loc"]
        path = _follow(raw, location)
        key = ".".join(path)
        if one["type"] in _UNKNOWN:
            if len(found) >= _MOST_COMPARED:
                found[key] = "unknown"
                continue
            name, known = str(location[-1]), _known_keys(kind)
            found[key] = unknown(one_line(key, 100), location, known)
            close = difflib.get_close_matches(name[:100], known, n=1, cutoff=0.4)
            misspelt.update(".".join([*path[:-1], meant]) for meant in close)
            continue
        if one["type"] == "too_short" and any(name.startswith(f"{key}.") for name in found):
            continue  # pydantic does not count an item that has a mistake
        # What is misspelt is missing under its own name too, and one of a union fails as each.
        if key not in found and not (one["type"] == "missing" and key in misspelt):
            found[key] = _describe(key, one)
    return found


@cache
def _known_keys(kind: type[BaseModel]) -> list[str]:
    """All keys of a record and of the records in it, the outermost first."""
    schema = kind.model_json_schema()
    parts = [schema, *schema.get("$defs", {}).values()]
    return [*dict.fromkeys(key for part in parts for key in part.get("properties", {}))]


def _follow(raw: Any, location: Location) -> list[str]:
    """The keys and positions of `location` in the file; pydantic names a union's member too."""
    path: list[str] = []
    for number, part in enumerate(location):
        is_last = number == len(location) - 1
        if isinstance(raw, Mapping) and (part in raw or is_last):
            raw = raw.get(part)
        elif isinstance(raw, Sequence) and not isinstance(raw, str) and isinstance(part, int):
            raw = raw[part] if part < len(raw) else None
        else:
            continue
        path.append(str(part))
    return path


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

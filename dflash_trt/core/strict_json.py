"""JSON that others wrote: bounded, no duplicate keys, no NaN or Infinity, one clear error."""

from __future__ import annotations

import json
import math
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from dflash_trt.core.files import FileKind, read_bytes
from dflash_trt.errors import DflashError, one_line

MAX_VALUES = 2_000_000
"""As many as a quarter of a million tensors have in a header; empty ones take 200 bytes each."""
MAX_DEPTH = 100
_MARKS = (b",", b"[", b"{")


def quoted(name: object) -> str:
    """A value from a file, quoted and escaped to printable ASCII, short enough for an error."""
    try:
        return one_line(json.dumps(name, default=str), limit=120)
    except (RecursionError, ValueError):
        return f"a {type(name).__name__}"


def parse_json(data: bytes, where: str | Path, most_values: int = MAX_VALUES) -> Any:
    """The value that `data` encodes; of `most_values`, a number or a text too is one.

    Raises:
        DflashError: not UTF-8, not JSON, nested too deeply, too many values, a key given twice,
            or a number that JSON does not have (NaN, Infinity, 1e999); `where` names the file.
    """
    _refuse_many(
        data, where, most_values
    )  # before they are made: an empty object is 2 bytes, and then 100
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=partial(_build, where))
        level = [value] if isinstance(value, dict | list) else []
        for _ in range(MAX_DEPTH):
            inner = (one.values() if isinstance(one, dict) else one for one in level)
            level = [one for one in chain.from_iterable(inner) if isinstance(one, dict | list)]
        if level:
            raise RecursionError
        _refuse_non_finite(None, value, where)
    except UnicodeDecodeError as error:
        what = f"not UTF-8 text (byte {error.start})"
        raise DflashError(what, where=where, fix="download the file again") from None
    except RecursionError:
        raise DflashError("JSON is nested too deeply", where=where) from None
    except ValueError as error:
        what = f"not valid JSON ({one_line(error, limit=120)})"
        raise DflashError(what, where=where, fix="download the file again") from None
    return value


def parse_given(data: bytes, where: str | Path) -> Any:
    """As `parse_json`, of what a user gives: its errors are of usage, without a file's advice."""
    try:
        return parse_json(data, where)
    except DflashError as error:
        raise DflashError(error.what, where=where, usage=True) from error


def read_json(path: str | Path, kind: FileKind = FileKind.CONFIG, *, named: bool = False) -> Any:
    """The value in the JSON file `path`; files as `core.files.read_bytes`, errors of both."""
    parse = parse_given if named else parse_json
    return parse(read_bytes(path, kind, named=named), path)


def read_json_object(
    path: str | Path, kind: FileKind = FileKind.CONFIG, *, named: bool = False
) -> dict[str, Any]:
    """As `read_json`, and the value must be an object."""
    value = read_json(path, kind, named=named)
    if not isinstance(value, dict):
        what = f"must hold a JSON object, not {type(value).__name__}"
        fix = None if named else "download the file again"
        raise DflashError(what, where=path, fix=fix, usage=named)
    return value


def _build(where: str | Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; json's own hook would keep the last of two equal keys."""
    built: dict[str, Any] = {}
    for key, value in pairs:
        if key in built:
            raise DflashError(f"key {quoted(key)} is given twice", where=where)
        _refuse_non_finite(key, value, where)
        built[key] = value
    return built


def _refuse_many(data: bytes, where: str | Path, most: int) -> None:
    """Every value but the first follows one of the marks; texts may hold those too."""
    if sum(map(data.count, _MARKS)) < most and data.count(b'"') <= 4 * most:
        return
    bare = data.replace(rb"\\", b"").replace(rb"\"", b"")  # every quote now begins or ends a text
    texts = bare.count(b'"') // 2
    if texts <= 2 * most:  # a key and a value each
        bare = b"".join(bare.split(b'"')[::2])
    if texts > 2 * most or sum(map(bare.count, _MARKS)) >= most:
        what = f"holds more than {most:,} JSON values"
        raise DflashError(what, where=where, fix="check that this is the right file")


def _refuse_non_finite(key: str | None, value: Any, where: str | Path) -> None:
    """`key` None is the top level."""
    if isinstance(value, float) and not math.isfinite(value):
        name = "the top level" if key is None else quoted(key)
        shown = "NaN" if math.isnan(value) else "infinite"
        fix = "JSON has only finite numbers: correct it"
        raise DflashError(f"{name} is {shown}", where=where, fix=fix)
    if isinstance(value, list):
        for item in value:
            _refuse_non_finite(key, item, where)

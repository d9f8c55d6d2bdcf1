"""JSON that others wrote: size-capped, no duplicate keys, no NaN or Infinity, one clear error."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from dflash_trt.errors import DflashError, one_line

MAX_JSON_BYTES = 64 * 1024 * 1024


def quoted(name: object) -> str:
    """A value from a file, quoted and escaped to printable ASCII, short enough for an error."""
    try:
        return one_line(json.dumps(name, default=str), limit=120)
    except (RecursionError, ValueError):
        return f"a {type(name).__name__}"


def is_file(path: Path) -> bool:
    """True for a regular file, through symlinks; False also where the folder cannot be read."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def parse_json(data: bytes, where: str | Path) -> Any:
    """The value that `data` encodes.

    Raises:
        DflashError: not UTF-8, not JSON, nested too deeply, a key given twice, or a number
            that JSON does not have (NaN, Infinity, 1e999); `where` names the file.
    """
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_Pairs(where))
        _refuse_non_finite("the top level", value, where)
    except UnicodeDecodeError as error:
        what = f"not UTF-8 text (byte {error.start})"
        raise DflashError(what, where=where, fix="download the file again") from None
    except RecursionError:
        raise DflashError("JSON is nested too deeply", where=where) from None
    except ValueError as error:
        what = f"not valid JSON ({one_line(error, limit=120)})"
        raise DflashError(what, where=where, fix="download the file again") from None
    return value


def read_json(path: str | Path) -> Any:
    """The value in the JSON file `path`, at most MAX_JSON_BYTES long; errors as `parse_json`."""
    path = Path(path)
    try:
        if not is_file(path):
            raise DflashError("no such file", where=path, fix="download the checkpoint again")
        with path.open("rb") as file:
            data = file.read(MAX_JSON_BYTES + 1)
    except (OSError, ValueError) as error:
        raise DflashError(f"cannot be read ({one_line(error)})", where=path) from None
    if len(data) > MAX_JSON_BYTES:
        what = f"larger than {MAX_JSON_BYTES} bytes, too large for a checkpoint's JSON"
        raise DflashError(what, where=path, fix="check that this is the right file")
    return parse_json(data, path)


def read_json_object(path: str | Path) -> dict[str, Any]:
    """As `read_json`, and the value must be an object."""
    value = read_json(path)
    if not isinstance(value, dict):
        what = f"must hold a JSON object, not {type(value).__name__}"
        raise DflashError(what, where=path, fix="download the file again")
    return value


class _Pairs:
    """Builds each JSON object; json's own hook would keep the last of two equal keys."""

    def __init__(self, where: str | Path) -> None:
        self.where = where

    def __call__(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        built: dict[str, Any] = {}
        for key, value in pairs:
            if key in built:
                raise DflashError(f"key {quoted(key)} is given twice", where=self.where)
            _refuse_non_finite(quoted(key), value, self.where)
            built[key] = value
        return built


def _refuse_non_finite(key: str, value: Any, where: str | Path) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        shown = "NaN" if math.isnan(value) else "infinite"
        fix = "JSON has only finite numbers: correct it"
        raise DflashError(f"{key} is {shown}", where=where, fix=fix)
    if isinstance(value, list):
        for item in value:
            _refuse_non_finite(key, item, where)

"""Reads the JSON files in which a folder says what it is: versioned, strict, one clear error."""

from __future__ import annotations

from pathlib import Path

from dflash_trt.core.strict_json import read_json_object
from dflash_trt.core.validation import Record, validate
from dflash_trt.errors import DflashError, one_line


def read_record(
    path: Path, kind: type[Record], schema_version: int, fix: str, *, usage: bool = False
) -> Record:
    """The `kind` in the file `path`; `fix` is what an error advises.

    With `usage` it is a file that the user named, and a bad one is wrong usage.

    Raises:
        DflashError: unreadable, another schema version, or fields that do not fit.
    """
    try:
        raw = read_json_object(path)
    except DflashError as error:
        if not usage:
            raise
        raise DflashError(error.what, where=path, usage=True) from error  # no checkpoint's advice
    version = raw.get("schema_version")
    if version != schema_version:
        raise DflashError(
            f"has schema version {one_line(version, 40)}, this version reads {schema_version}",
            where=path,
            fix=fix,
            usage=usage,
        )
    return validate(kind, raw, path, fix=fix, usage=usage)

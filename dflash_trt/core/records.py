"""Reads the JSON files in which a folder says what it is: versioned, strict, one clear error."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from dflash_trt.core.strict_json import read_json_object
from dflash_trt.errors import DflashError, one_line

Record = TypeVar("Record", bound=BaseModel)


def read_record(path: Path, kind: type[Record], schema_version: int, fix: str) -> Record:
    """The `kind` in the file `path`; `fix` is what an error advises.

    Raises:
        DflashError: unreadable, another schema version, or fields that do not fit.
    """
    raw = read_json_object(path)
    version = raw.get("schema_version")
    if version != schema_version:
        raise DflashError(
            f"has schema version {one_line(version, 40)}, this version reads {schema_version}",
            where=path,
            fix=fix,
        )
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        what = first["msg"].removeprefix("Value error, ")
        raise DflashError(
            one_line(f"{key}: {what}" if key else what), where=path, fix=fix
        ) from error

"""Reads a local copy of SPEED-Bench (arXiv 2604.09557, nvidia/SPEED-Bench on the hub).

Its licence forbids shipping the prompts. Pass the folder or file of one split as downloaded
(Parquet, which needs pyarrow), or JSON lines with the same columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dflash_trt.core.files import FileKind, find_file, read_bytes
from dflash_trt.core.strict_json import parse_json
from dflash_trt.errors import DflashError, nearest, one_line

_SUFFIXES = (".jsonl", ".parquet")


def read_speed_bench(path: Path, categories: tuple[str, ...] = ()) -> list[str]:
    """The first turn of every question in `path`; of all categories if none are given.

    Raises:
        DflashError: no such files, rows without `turns` and `category`, an unknown category.
    """
    questions = [
        _read_row(row, f"{file}:{number}")
        for file in _files(path)
        for number, row in enumerate(_rows(file), start=1)
    ]
    known = sorted({category for category, _ in questions})
    for category in categories:
        if category not in known:
            raise DflashError(
                f"no category {category!r}{nearest(category, known)}", where=path, usage=True
            )
    prompts = [text for category, text in questions if not categories or category in categories]
    if not prompts:
        raise DflashError("holds no question", where=path, usage=True)
    return prompts


def _files(path: Path) -> list[Path]:
    if path.is_file():
        files = [path] if path.suffix in _SUFFIXES else []
    else:
        files = sorted(file for file in path.glob("*") if file.suffix in _SUFFIXES)
    if not files:
        raise DflashError(
            "no .jsonl or .parquet file of SPEED-Bench there",
            where=path,
            fix="pass the folder of one split, for example throughput_1k",
            usage=True,
        )
    return files


def _rows(file: Path) -> Iterator[Any]:
    if file.suffix == ".jsonl":
        lines = read_bytes(file, FileKind.DATA_SET, named=True).split(b"\n")
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield parse_json(line, f"{file}:{number}")
        return
    found = find_file(file, FileKind.DATA_SET, named=True)
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise DflashError(
            "is Parquet, which needs pyarrow", where=file, fix="pip install pyarrow"
        ) from error
    try:
        yield from parquet.read_table(found, columns=["category", "turns"]).to_pylist()
    except Exception as error:  # pyarrow raises types of its own; the file is at fault
        raise DflashError(f"is not SPEED-Bench: {one_line(error)}", where=file) from error


def _read_row(row: Any, where: str) -> tuple[str, str]:
    """(category, first turn)."""
    if isinstance(row, dict):
        category, turns = row.get("category"), row.get("turns")
        if isinstance(category, str) and isinstance(turns, list) and turns:
            first = turns[0]
            if isinstance(first, str):
                return category, first
    raise DflashError("has no category and turns, as SPEED-Bench's rows", where=where, usage=True)

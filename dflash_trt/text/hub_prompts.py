"""Prompts of a data set on the Hugging Face hub: which files of it, and which of their columns."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from dflash_trt.core.files import FileKind, find_file, read_text
from dflash_trt.core.strict_json import parse_json
from dflash_trt.errors import DflashError, first_few, nearest, one_line
from dflash_trt.models.hub import HUB_NAME, download
from dflash_trt.text.prompts import PromptRecord

SCHEME = "hf"
EXAMPLE = "hf://openai/gsm8k?config=main&split=test&column=question"
# The first kind that a split has is read: a data set may hold the same rows in several.
SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")

_KEYS = ("config", "split", "file", "column", "answer", "category", "revision")
_ROWS_AT_ONCE = 1024


def is_hub_address(source: str) -> bool:
    """Whether a source of prompts is on the hub: hf://OWNER/NAME?…"""
    return source.startswith(f"{SCHEME}://")


@dataclass(frozen=True, slots=True, kw_only=True)
class HubPrompts:
    """An address hf://OWNER/NAME?column=…&split=… of prompts.

    Args:
        address: as it was given, for errors.
        repository: OWNER/NAME.
        column: of the prompt: a text, or a conversation's turns, of which the first is taken.
        split: whose files are read: SPLIT.jsonl, SPLIT-00000-of-00001.parquet and the like, in
            the folder `config`, `data`, or the data set's own.
        config: the data set's configuration, which names a folder of it.
        file: path or pattern of the files instead, where their names follow no rule.
        answer, category: columns of these, if there are any; see `PromptRecord`.
        revision: branch, tag or commit; None for the default.
    """

    address: str
    repository: str
    column: str = "prompt"
    split: str = "test"
    config: str | None = None
    file: str | None = None
    answer: str | None = None
    category: str | None = None
    revision: str | None = None

    @staticmethod
    def parse(address: str) -> HubPrompts:
        """Raises DflashError (usage) for anything else than such an address."""
        try:
            parts = urlsplit(address)
            pairs = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
        except ValueError as error:
            raise _refusal(address, f"is no address ({one_line(error, 80)})") from error
        repository = f"{parts.netloc}{parts.path}"
        if not HUB_NAME.fullmatch(repository) or parts.fragment:
            raise _refusal(address, "names no data set")
        given: dict[str, str] = {}
        for key, value in pairs:
            if key not in _KEYS:
                raise _refusal(address, f"no such key: {key!r}{nearest(key, list(_KEYS))}")
            if key in given or not value:
                raise _refusal(address, f"{key} needs one value")
            given[key] = value
        if "file" in given and given.keys() & {"config", "split"}:
            raise _refusal(address, "give file, or config and split, not both")
        return HubPrompts(address=address, repository=repository, **given)

    @property
    def patterns(self) -> list[str]:
        """Of the paths of its files in the data set."""
        if self.file is not None:
            return [self.file]
        own = "" if self.config is None else f"{self.config}/"
        folders = own, f"data/{own}"
        return [
            f"{folder}{self.split}{rest}{suffix}"
            for folder in folders
            for rest in ("", "-*", "/*")
            for suffix in SUFFIXES
        ]

    def read(self, limit: int | None = None) -> list[PromptRecord]:
        """Downloads the files and reads the first `limit` prompts.

        Raises:
            DflashError: no network, no such data set, files or column, a file that is too large
                or cannot be read, Parquet without pyarrow.
        """
        folder = download(
            self.repository,
            self.patterns,
            revision=self.revision,
            kind="dataset",
            fix="with no network, pass a local file of JSON lines: --prompts NAME=FILE.jsonl",
        )
        files = self._find(folder)
        rows = (row for file in files for row in _read_rows(file, self._columns, self.address))
        records = [
            self._to_record(row, f"{self.address}, row {number}")
            for number, row in enumerate(islice(rows, limit), start=1)
        ]
        if not records:
            raise DflashError("holds no prompt", where=self.address, usage=True)
        return records

    @property
    def _columns(self) -> list[str]:
        return [name for name in (self.column, self.answer, self.category) if name is not None]

    def _find(self, folder: Path) -> list[Path]:
        """Its files in a snapshot, all of one kind; the hub's cache may hold others beside them."""
        found = [
            path
            for path in sorted(folder.rglob("*"))
            if path.is_file()
            and any(fnmatchcase(path.relative_to(folder).as_posix(), one) for one in self.patterns)
        ]
        for suffix in SUFFIXES:
            if files := [path for path in found if path.suffix == suffix]:
                return files
        wanted = first_few(self.patterns, 3)
        what = f"has no file such as {wanted}"
        fix = "name its config and split, or its file=PATH (.jsonl, .json, .csv or .parquet)"
        raise DflashError(what, where=self.address, fix=fix, usage=True)

    def _to_record(self, row: Any, where: str) -> PromptRecord:
        if not isinstance(row, dict):
            raise DflashError("is no object", where=where, usage=True)
        for name in self._columns:
            _check_column(name, [str(key) for key in row], where)
        prompt = row[self.column]
        if isinstance(prompt, list) and prompt:
            prompt = prompt[0]
        raw = {"prompt": prompt}
        raw |= {} if self.answer is None else {"answer": row[self.answer]}
        raw |= {} if self.category is None else {"category": row[self.category]}
        return PromptRecord.of(raw, where)


def _read_rows(file: Path, columns: list[str], address: str) -> Iterator[Any]:
    where = f"{address}: {file.name}"
    if file.suffix == ".parquet":
        yield from _read_parquet(file, columns, where)
        return
    text = read_text(file, FileKind.DATA_SET)
    if file.suffix == ".csv":
        try:
            yield from csv.DictReader(io.StringIO(text, newline=""), strict=True)
        except csv.Error as error:
            raise DflashError(f"is not CSV ({one_line(error, 80)})", where=where) from error
    elif text.lstrip().startswith("["):
        rows = parse_json(text.encode(), where)
        yield from rows if isinstance(rows, list) else []
    else:
        for number, line in enumerate(text.split("\n"), start=1):
            if line.strip():
                yield parse_json(line.encode(), f"{where}:{number}")


def _read_parquet(file: Path, columns: list[str], where: str) -> Iterator[Any]:
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        what = f"is Parquet, which needs pyarrow ({one_line(error, 80)})"
        raise DflashError(what, where=where, fix="pip install pyarrow") from error
    try:
        with parquet.ParquetFile(find_file(file, FileKind.DATA_SET)) as opened:
            known = list(opened.schema_arrow.names)
            for name in columns:
                _check_column(name, known, where)
            for batch in opened.iter_batches(batch_size=_ROWS_AT_ONCE, columns=columns):
                yield from batch.to_pylist()
    except DflashError:
        raise
    except Exception as error:  # pyarrow raises types of its own; the file is at fault
        what = f"is no readable Parquet ({one_line(error, 120)})"
        raise DflashError(what, where=where) from error


def _check_column(name: str, known: list[str], where: str) -> None:
    if name not in known:
        what = f"has no column {name!r}{nearest(name, known)}"
        raise DflashError(one_line(what), where=where, usage=True)


def _refusal(address: str, what: str) -> DflashError:
    return DflashError(what, where=one_line(address, 120), fix=f"write it as {EXAMPLE}", usage=True)

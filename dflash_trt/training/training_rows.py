"""Prompts to train on, as files have them, and those of them that are held out."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_trt.core.files import FileKind, read_text
from dflash_trt.core.strict_json import parse_json
from dflash_trt.errors import DflashError
from dflash_trt.text.chat import Message
from dflash_trt.text.hub_prompts import HubPrompts, is_hub_address
from dflash_trt.text.prompts import PromptRecord, check_texts
from dflash_trt.text.task_sets import name_sources

HELD_OUT_SHARE = 0.05
HELD_OUT_LEAST, HELD_OUT_MOST = 16, 100
LEAST_PROMPTS = 8
ROLES = ("system", "developer", "user", "assistant")


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRow:
    """A line of a file.

    Args:
        messages: the conversation up to the answer; a "prompt" is a user's message.
        text: of a "prompt" alone, for targets without a chat template.
        answer: a known one, as text or as token ids.
        prompt_ids: what the line says that serving sends, None where it does not.
        category: the kind of question.
        where: file and line, for errors.
    """

    messages: tuple[Message, ...]
    text: str | None
    answer: str | tuple[int, ...] | None
    prompt_ids: tuple[int, ...] | None
    set_name: str
    category: str | None
    where: str

    @property
    def row_id(self) -> str:
        """Equal for two rows that ask the same."""
        asked = json.dumps([dict(message) for message in self.messages], sort_keys=True)
        return hashlib.sha256(asked.encode("utf-8", "surrogatepass")).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class NamedRows:
    """A named set and its rows; `sha256` is that of its file, or of what the hub's had."""

    name: str
    rows: tuple[PromptRow, ...]
    sha256: str


@dataclass(frozen=True, slots=True)
class SplitRows:
    """Rows to train on and rows to measure on, none in both; `repeated` were left out, as were
    `unmeasured` held-out ones, since no more are needed."""

    train: tuple[PromptRow, ...]
    held_out: tuple[PromptRow, ...]
    repeated: int
    unmeasured: int = 0


def read_sets(given: Sequence[str]) -> list[NamedRows]:
    """Sets of texts [NAME=]SOURCE, where a source is a .jsonl file or an address on the hub.

    Raises:
        DflashError: a name that stands twice, a source that cannot be used, or a line that asks
            nothing (usage).
    """
    return [_read_set(name, source) for name, source in name_sources(given).items()]


def _read_set(name: str, source: str) -> NamedRows:
    if is_hub_address(source):
        records = HubPrompts.parse(source).read()
        lines = [(_as_line(record), f"{source}, prompt {i}") for i, record in enumerate(records, 1)]
        content = json.dumps([line for line, _ in lines]).encode()
    else:
        path = Path(source)
        if path.suffix != ".jsonl":
            fix = 'one object a line, with a "prompt" or "messages"'
            raise DflashError("prompts must be a .jsonl file", where=path, fix=fix, usage=True)
        content = read_text(path, FileKind.DATA_SET, named=True).encode()
        lines = [
            (_parse(line, f"{path}:{number}"), f"{path}:{number}")
            for number, line in enumerate(content.split(b"\n"), start=1)
            if line.strip()
        ]
    rows = tuple(_read_row(line, name, where) for line, where in lines)
    if not rows:
        raise DflashError("holds no prompt", where=source, usage=True)
    return NamedRows(name, rows, hashlib.sha256(content).hexdigest())


def _as_line(record: PromptRecord) -> dict[str, Any]:
    answer = list(record.answer) if isinstance(record.answer, tuple) else record.answer
    return {"prompt": record.text, "answer": answer, "category": record.category}


def _parse(line: bytes, where: str) -> Any:
    try:
        return parse_json(line, where)
    except DflashError as error:
        raise DflashError(error.what, where=where, usage=True) from error


def split_rows(prompts: Iterable[PromptRow], held_out: Sequence[PromptRow] | None) -> SplitRows:
    """Rows in an order that their hashes give, each once; without `held_out` some are split off.

    5 % of them, at least 16 and at most 100, but never more than a quarter.

    Raises:
        DflashError: too few prompts are left (usage).
    """
    given = list(prompts)
    unique = {row.row_id: row for row in reversed(given)}
    ordered = [unique[row_id] for row_id in sorted(unique)]
    if held_out is None:
        share = round(HELD_OUT_SHARE * len(ordered))
        count = min(max(share, HELD_OUT_LEAST), HELD_OUT_MOST, len(ordered) // 4)
        measured, train = ordered[:count], ordered[count:]
    else:
        chosen = {row.row_id: row for row in reversed(held_out)}
        measured = [chosen[row_id] for row_id in sorted(chosen)][:HELD_OUT_MOST]
        train = [row for row in ordered if row.row_id not in chosen]
    unmeasured = 0 if held_out is None else len(chosen) - len(measured)
    if len(train) < LEAST_PROMPTS or not measured:
        what = f"{len(train)} different prompts to train on and {len(measured)} to measure on"
        fix = f"give at least {2 * LEAST_PROMPTS}"
        raise DflashError(f"{what} are too few", where="--prompts", fix=fix, usage=True)
    return SplitRows(tuple(train), tuple(measured), len(given) - len(unique), unmeasured)


def _read_row(record: Any, set_name: str, where: str) -> PromptRow:
    if not isinstance(record, dict):
        raise _bad_row(where)
    text, messages = record.get("prompt"), record.get("messages")
    answer, category = record.get("answer"), record.get("category")
    if isinstance(text, str) and messages is None:
        asked: tuple[Message, ...] = ({"role": "user", "content": text},)
    elif isinstance(messages, list) and text is None and all(map(_is_message, messages)):
        asked = tuple({"role": one["role"], "content": one["content"]} for one in messages)
        if asked and asked[-1]["role"] == "assistant":
            if answer is not None:
                what = 'has an "answer" and messages that end with one'
                raise DflashError(what, where=where, fix="leave one out", usage=True)
            asked, answer = asked[:-1], asked[-1]["content"]
    else:
        raise _bad_row(where)
    said = [message["content"] for message in asked if message["role"] == "user"]
    if not any(one.strip() for one in said):
        raise DflashError("its prompt has no text", where=where, usage=True)
    check_texts([one["content"] for one in asked if one["content"]], where)
    if answer is not None and not isinstance(answer, str):
        answer = _read_ids(answer, "answer", where)
    stated = record.get("prompt_ids")
    return PromptRow(
        messages=asked,
        text=text,
        answer=answer or None,
        prompt_ids=None if stated is None else _read_ids(stated, "prompt_ids", where),
        set_name=set_name,
        category=category if isinstance(category, str) else None,
        where=where,
    )


def _is_message(item: Any) -> bool:
    return (
        isinstance(item, dict)
        and item.get("role") in ROLES
        and isinstance(item.get("content"), str)
    )


def _bad_row(where: str) -> DflashError:
    what = 'must be an object with a text "prompt", or "messages" of role and content'
    return DflashError(what, where=where, usage=True)


def _read_ids(ids: object, key: str, where: str) -> tuple[int, ...]:
    if isinstance(ids, list) and ids and all(type(one) is int and one >= 0 for one in ids):
        return tuple(ids)
    kind = "neither a text nor token ids" if key == "answer" else "not token ids"
    raise DflashError(f'its "{key}" is {kind}', where=where, usage=True)

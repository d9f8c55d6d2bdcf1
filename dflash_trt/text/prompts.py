"""Prompts: text given or read from a file, whole or as JSON lines; and their token ids."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_trt.core.files import FileKind, read_text
from dflash_trt.core.strict_json import parse_given, quoted
from dflash_trt.errors import DflashError
from dflash_trt.text.tokenizer import BundleTokenizer

STDIN = "-"
"""As a prompt: what stands on stdin."""


@dataclass(frozen=True, slots=True)
class PromptRecord:
    """A prompt, and what a line of JSON may say about it; other keys of a line mean nothing.

    Args:
        text: the line's "prompt".
        answer: a known answer, as text or as token ids.
        category: the kind of question, in the words of its data set.
        schema: a JSON schema, as text, that a sweep asks the answer to follow.
    """

    text: str
    answer: str | tuple[int, ...] | None = None
    category: str | None = None
    schema: str | None = None

    @staticmethod
    def of(raw: Any, where: str) -> PromptRecord:
        """The record of one JSON object; `where` names it in the error, which is of usage."""
        if not isinstance(raw, dict) or not isinstance(raw.get("prompt"), str):
            raise DflashError('must be an object with a text "prompt"', where=where, usage=True)
        answer, category = raw.get("answer"), raw.get("category")
        if isinstance(answer, list) and all(type(one) is int and one >= 0 for one in answer):
            answer = tuple(answer)
        elif answer is not None and not isinstance(answer, str):
            what = f'"answer" must be a text or token ids, not {quoted(answer)}'
            raise DflashError(what, where=where, usage=True)
        if category is not None and not isinstance(category, str):
            what = f'"category" must be a text, not {quoted(category)}'
            raise DflashError(what, where=where, usage=True)
        schema = raw.get("schema")
        if schema is not None and not isinstance(schema, dict):
            what = f'"schema" must be a JSON schema, not {quoted(schema)}'
            raise DflashError(what, where=where, usage=True)
        text = None if schema is None else json.dumps(schema, separators=(",", ":"))
        return PromptRecord(raw["prompt"], answer, category, text)


def read_prompts(path: Path) -> list[str]:
    """The texts of `read_records`."""
    return [record.text for record in read_records(path)]


def read_records(path: Path) -> list[PromptRecord]:
    """The prompts in `path`: of a `.jsonl` one each line, else the file as one prompt.

    A plain file loses one trailing newline, the one that editors add.

    Raises:
        DflashError: unreadable, too large, not UTF-8, a line that is no record, or no prompt at
            all.
    """
    text = read_text(path, FileKind.PROMPTS, named=True)
    records = []
    if path.suffix == ".jsonl":
        for number, line in enumerate(text.split("\n"), start=1):
            if line.strip():
                where = f"{path}:{number}"
                records.append(PromptRecord.of(parse_given(line.encode(), where), where))
    elif text:
        records.append(PromptRecord(text.removesuffix("\n")))
    if not records:
        raise DflashError("holds no prompt", where=path, usage=True)
    return records


def check_texts(texts: Iterable[str], source: str | Path | None) -> None:
    """Raises DflashError (usage) for an empty text, or one that is not Unicode."""
    for number, text in enumerate(texts, start=1):
        problem = "" if text else "the prompt is empty; give it some text"
        try:
            text.encode()
        except UnicodeEncodeError as error:
            # A lone surrogate: bytes on the command line that are not UTF-8, or JSON's \ud800.
            problem = f"is not Unicode text at character {error.start}"
        if problem:
            where = "--prompt" if source is None else f"{source}, prompt {number}"
            raise DflashError(problem, where=where, usage=True)


def read_given(
    prompt: str | None, prompt_file: Path | None, default_file: Path | None = None
) -> list[PromptRecord]:
    """The prompts asked for.

    Raises:
        DflashError: both or neither given, an empty prompt, a file that cannot be used.
    """
    if prompt is not None and prompt_file is not None:
        raise DflashError("give --prompt or --prompt-file, not both", usage=True)
    file = prompt_file or (default_file if prompt is None else None)
    if file is not None:
        records = read_records(file)
    elif prompt is not None:
        records = [PromptRecord(prompt)]
    else:
        raise DflashError("no prompt", fix="pass --prompt TEXT or --prompt-file FILE", usage=True)
    check_texts((record.text for record in records), file)
    return records


def read_stdin() -> str:
    """The text on stdin as one prompt, without one trailing newline.

    Raises:
        DflashError: stdin is closed, too large, or not UTF-8.
    """
    stream = None if sys.stdin is None else getattr(sys.stdin, "buffer", None)
    data = b"" if stream is None else stream.read(FileKind.PROMPTS.limit + 1)
    if len(data) > FileKind.PROMPTS.limit:
        raise DflashError("has more bytes than prompts can", where="stdin", usage=True)
    try:
        return str(data.decode("utf-8")).removesuffix("\n")
    except UnicodeDecodeError as error:
        what = f"is not UTF-8 at byte {error.start}"
        raise DflashError(what, where="stdin", usage=True) from error


def encode_prompts(
    tokenizer: BundleTokenizer,
    texts: list[str],
    *,
    raw: bool,
    system: str | None = None,
    variables: Mapping[str, Any] | None = None,
) -> list[list[int]]:
    """Token ids of prompts, through the chat template where there is one and not `raw`.

    `variables` are the template's own.
    """
    if tokenizer.chat_template is not None and not raw:
        return tokenizer.encode_chats(texts, system, variables)
    return [tokenizer.encode(text) for text in texts]


def encode_calibration(folder: Path, file: Path) -> list[list[int]]:
    """Token ids of the texts in `file`, as the tokenizer of the checkpoint in `folder` reads them.

    Raises:
        DflashError: the checkpoint has no tokenizer, or a file that cannot be used.
    """
    if not (folder / "tokenizer.json").is_file():
        what = "has no tokenizer.json, which calibration texts need"
        fix = "download the checkpoint's tokenizer"
        raise DflashError(what, where=folder, fix=fix)
    texts = [one.text for one in read_given(None, file)]
    return encode_prompts(BundleTokenizer(folder), texts, raw=False)

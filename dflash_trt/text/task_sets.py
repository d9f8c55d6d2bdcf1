"""Named sets of prompts, such as the benchmarks of a paper, and their prompts as token ids."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dflash_trt.errors import DflashError, one_line
from dflash_trt.text.hub_prompts import HubPrompts, is_hub_address
from dflash_trt.text.prompts import PromptRecord, check_texts, encode_prompts, read_records
from dflash_trt.text.tokenizer import BundleTokenizer

ALL = "all"
"""The row of a table that has all sets together."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,39}")


@dataclass(frozen=True, slots=True)
class TaskSet:
    """A set's name, which is unique among those given, and its prompts, at least one."""

    name: str
    prompts: tuple[PromptRecord, ...]


@dataclass(frozen=True, slots=True)
class Task:
    """A prompt of a set with its token ids; `number` counts in the set from 1."""

    set_name: str
    number: int
    prompt: PromptRecord
    ids: tuple[int, ...]

    @property
    def label(self) -> str:
        """What errors call it."""
        return f"{self.set_name}, prompt {self.number}"


def name_sources(given: Sequence[str]) -> dict[str, str]:
    """Source by name, of texts NAME=SOURCE or SOURCE, whose name is then its stem.

    Raises:
        DflashError: no simple name, or one that stands twice (usage).
    """
    sources: dict[str, str] = {}
    for text in given:
        name, separator, source = text.partition("=")
        if not separator or "/" in name:  # a path, or an address, that has a "=" of its own
            name, source = _stem(text), text
        check_set_name(name, text)
        if not source:
            raise DflashError(f"{text!r} names no file", where="--prompts", usage=True)
        if name in sources:
            what = f"two sets are named {name!r}"
            fix = "name them apart: --prompts NAME=FILE"
            raise DflashError(what, where="--prompts", fix=fix, usage=True)
        sources[name] = source
    return sources


def check_set_name(name: str, where: str) -> None:
    """Raises DflashError (usage) unless `name` is simple enough for tables, keys and files."""
    if name == ALL or not _NAME.fullmatch(name):
        what = f"{one_line(repr(name), 50)} cannot name a set of prompts"
        fix = "give NAME=FILE, with up to 40 letters, digits and . _ + - in the name"
        if name == ALL:
            fix = "that is all sets together; choose another name"
        raise DflashError(what, where=where, fix=fix, usage=True)


def read_task_sets(sources: Mapping[str, str], limit: int | None = None) -> list[TaskSet]:
    """The sets of `sources` (a file or a hub address by name), the first `limit` prompts of each.

    Raises:
        DflashError: a file or a data set that cannot be used, an empty prompt.
    """
    return [read_task_set(name, source, limit) for name, source in sources.items()]


def read_task_set(name: str, source: str, limit: int | None = None) -> TaskSet:
    """One of them; see `read_task_sets`."""
    if is_hub_address(source):
        records = HubPrompts.parse(source).read(limit)
    else:
        records = read_records(Path(source))[:limit]
    check_texts((record.text for record in records), source)
    return TaskSet(name, tuple(records))


def encode_tasks(tokenizer: BundleTokenizer, sets: Sequence[TaskSet]) -> list[Task]:
    """The prompts of all sets in order, through the chat template where there is one.

    Raises:
        DflashError: a prompt that the tokenizer or the chat template refuses.
    """
    texts = [prompt.text for one in sets for prompt in one.prompts]
    encoded = iter(encode_prompts(tokenizer, texts, raw=False))
    return [
        Task(one.name, number, prompt, tuple(next(encoded)))
        for one in sets
        for number, prompt in enumerate(one.prompts, start=1)
    ]


def _stem(source: str) -> str:
    if is_hub_address(source):
        return HubPrompts.parse(source).repository.rpartition("/")[2]
    return Path(source).stem

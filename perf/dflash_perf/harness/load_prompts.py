"""The prompts of a sweep, from files or the hub, cut to length."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from dflash_perf.harness.sweep_config import SweepConfig
from dflash_trt.core.files import FileKind, read_bytes
from dflash_trt.errors import DflashError
from dflash_trt.text.prompts import PromptRecord, read_records
from dflash_trt.text.task_sets import read_task_sets
from dflash_trt.text.tokenizer_calls import decode, encode, open_tokenizer

_SEAM = "\n\n"
_MARGIN = 8


class Tokenizer:
    """A tokenizer.json: cuts prompts to length, and counts tokens if the server does not."""

    def __init__(self, path: Path) -> None:
        """Opens the file itself, or that of a checkpoint folder or bundle."""
        places = (path, path / "tokenizer.json", path / "tokenizer" / "tokenizer.json")
        file = next((place for place in places if place.is_file()), None)
        if file is None:
            raise DflashError("no tokenizer.json there", where=path, usage=True)
        try:
            self._core = open_tokenizer(read_bytes(file, FileKind.TOKENIZER, named=True), file)
        except DflashError as error:
            raise DflashError(error.what, where=error.where, usage=True) from error

    def encode(self, text: str) -> list[int]:
        """The tokens of `text`, without special ones."""
        return encode(self._core, text, special=False)

    def count(self, text: str) -> int:
        """The number of tokens of `text`, without special tokens."""
        return len(self.encode(text))

    def cut(self, ids: Sequence[int], length: int) -> str | None:
        """The text of a beginning of `ids` that encodes to `length` tokens; None if none does.

        A cut can split a character or a merge of the tokenizer, so nearby cuts are tried too.
        """
        for extra in sorted(range(-_MARGIN, _MARGIN + 1), key=abs):
            cut = decode(self._core, list(ids[: length + extra]))
            if "\ufffd" not in cut and self.count(cut) == length:
                return cut
        return None


@dataclass(frozen=True, slots=True)
class PromptSet:
    """The prompts, and the order in which a run sends them.

    The order depends on the seed alone, so every configuration gets the same requests. `set_names`
    has the named set of each prompt; empty where sets have no names. `schemas` has the JSON schema
    that each answer has to follow; empty where there is none.
    """

    texts: tuple[str, ...]
    set_names: tuple[str, ...] = ()
    schemas: tuple[str | None, ...] = ()

    @property
    def digest(self) -> str:
        """sha256 of all prompts, in order, of the names of their sets, and of their schemas."""
        digest = hashlib.sha256()
        for prompt in (*self.texts, *self.set_names, *(one or "" for one in self.schemas)):
            data = prompt.encode()
            digest.update(len(data).to_bytes(8, "little") + data)
        return digest.hexdigest()

    def order(self, seed: str) -> Iterator[int]:
        """Indices of prompts without end: all of them shuffled, then all in a new order, …"""
        for turn in count():
            generator = random.Random(f"{seed}:{turn}")
            yield from generator.sample(range(len(self.texts)), len(self.texts))


def load_prompts(config: SweepConfig, tokenizer: Tokenizer | None) -> PromptSet:
    """The prompts that `config` asks for.

    Raises:
        DflashError: a file that cannot be used, an empty prompt, too little text for `isl`, or a
            schema of answers that go on behind its end.
    """
    texts: list[str] = []
    names: list[str] = []
    given: list[PromptRecord] = []
    if config.input_file is not None:
        given = read_records(Path(config.input_file))[: config.limit_prompts]
        texts = _prepare(given, config, tokenizer, config.input_file)
    for one in read_task_sets(config.prompts, config.limit_prompts):
        given += one.prompts
        texts += _prepare(one.prompts, config, tokenizer, config.prompts[one.name])
        names += [one.name] * len(one.prompts)
    schemas = tuple(one.schema for one in given)
    if any(schemas) and config.ignore_eos:
        what = "prompts with a schema end where it does"
        raise DflashError(what, where="ignore_eos", fix="leave it out", usage=True)
    return PromptSet(tuple(texts), tuple(names), schemas if any(schemas) else ())


def _prepare(
    records: Sequence[PromptRecord], config: SweepConfig, tokenizer: Tokenizer | None, source: str
) -> list[str]:
    """The prompts of one source; with `isl` of so many tokens: each goes on with the next ones.

    Random tokens would be simpler but distort acceptance.
    """
    prompts = [one.text for one in records]
    for number, prompt in enumerate(prompts, start=1):
        if not prompt.strip():
            raise DflashError(f"prompt {number} is empty", where=source, usage=True)
    if config.isl is None:
        return prompts
    assert tokenizer is not None, "the settings say so"
    length = config.isl
    held = sum(map(tokenizer.count, prompts))
    if held < length:
        what = f"all prompts together have {held:,} tokens, prompts of {length:,} need more"
        raise DflashError(what, where=source, usage=True)
    turns = -(-(length + _MARGIN) // held) + 1
    found = []
    for first in range(len(prompts)):
        text = _SEAM.join(prompts[first:] + prompts * turns)
        ids = tokenizer.encode(text[: (length + _MARGIN) * 64])
        cut = tokenizer.cut(ids, length)
        if cut is None:
            what = f"prompt {first + 1} cannot be cut to {length} tokens that encode to as many"
            raise DflashError(what, where=source, fix="choose another isl")
        found.append(cut)
    return found

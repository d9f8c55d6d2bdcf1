"""The prompts of a sweep, from a JSON-lines file or a local SPEED-Bench copy, cut to length."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count, cycle
from pathlib import Path

from dflash_perf.harness.speed_bench import read_speed_bench
from dflash_perf.harness.sweep_config import SweepConfig
from dflash_trt.core.files import FileKind, read_bytes
from dflash_trt.errors import DflashError
from dflash_trt.text.prompts import PromptRecord, read_records
from dflash_trt.text.task_sets import read_task_sets
from dflash_trt.text.tokenizer_calls import decode, encode, open_tokenizer

RANDOM_WORDS = "random words"
"""The set that prompts belong to which nobody wrote."""
_RANDOM_PROMPTS, _TRIES = 128, 32
_SEAM = "\n\n"
_MARGIN = 8


class Tokenizer:
    """A tokenizer.json: cuts prompts to length, and counts tokens if the server does not."""

    def __init__(self, path: Path) -> None:
        file = _find(path)
        try:
            self._core = open_tokenizer(read_bytes(file, FileKind.TOKENIZER, named=True), file)
        except DflashError as error:
            raise DflashError(error.what, where=error.where, usage=True) from error

    def count(self, text: str) -> int:
        """The number of tokens of `text`, without special tokens."""
        return len(self._encode(text))

    def cut(self, text: str, length: int) -> str | None:
        """A beginning of `text` that encodes to `length` tokens; None if none is found.

        A cut can split a character or a merge of the tokenizer, so nearby cuts are tried too.
        """
        ids = self._encode(text)
        for extra in sorted(range(-_MARGIN, _MARGIN + 1), key=abs):
            cut = decode(self._core, ids[: length + extra])
            if "\ufffd" not in cut and self.count(cut) == length:
                return cut
        return None

    def words(self) -> list[str]:
        """Words of letters alone that are one token each, in the order of their ids."""
        texts = (
            decode(self._core, [index]).strip() for index in range(self._core.get_vocab_size())
        )
        return [text for text in texts if len(text) > 1 and text.isascii() and text.isalpha()]

    def _encode(self, text: str) -> list[int]:
        return encode(self._core, text, special=False)


def _find(path: Path) -> Path:
    """The tokenizer.json at `path`: the file itself, or that of a checkpoint folder or bundle."""
    for file in (path, path / "tokenizer.json", path / "tokenizer" / "tokenizer.json"):
        if file.is_file():
            return file
    raise DflashError("no tokenizer.json there", where=path, usage=True)


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
            tokenizer of too few words for random ones.
    """
    if config.is_synthetic:
        assert tokenizer is not None and config.isl is not None, "the settings say so"
        texts = random_prompts(
            tokenizer, config.isl, config.limit_prompts or _RANDOM_PROMPTS, config.seed
        )
        return PromptSet(tuple(texts), (RANDOM_WORDS,) * len(texts))
    if config.input_file is not None:
        path = Path(config.input_file)
        if config.dataset == "speed-bench":
            records = [PromptRecord(one) for one in read_speed_bench(path, config.categories)]
        else:
            records = read_records(path)
        records = records[: config.limit_prompts]
        prepared = _prepare([one.text for one in records], config, tokenizer, path)
        return PromptSet(prepared, schemas=_schemas(records, config))
    texts, names, given = [], [], list[PromptRecord]()
    for one in read_task_sets(config.prompts, config.limit_prompts):
        prompts = [prompt.text for prompt in one.prompts]
        texts += _prepare(prompts, config, tokenizer, config.prompts[one.name])
        names += [one.name] * len(prompts)
        given += one.prompts
    return PromptSet(tuple(texts), tuple(names), _schemas(given, config))


def _schemas(records: Sequence[PromptRecord], config: SweepConfig) -> tuple[str | None, ...]:
    """Of each prompt; none at all where no prompt has one.

    Raises:
        DflashError: the sweep goes on behind the end that a schema has (usage).
    """
    schemas = tuple(one.schema for one in records)
    if not any(schemas):
        return ()
    if config.ignore_eos:
        what = "prompts with a schema end where it does"
        raise DflashError(what, where="ignore_eos", fix="leave it out", usage=True)
    return schemas


def _prepare(
    prompts: Sequence[str], config: SweepConfig, tokenizer: Tokenizer | None, source: str | Path
) -> tuple[str, ...]:
    """The prompts of one source, checked, and cut to `isl` from the text of that source alone."""
    for number, prompt in enumerate(prompts, start=1):
        if not prompt.strip():
            raise DflashError(f"prompt {number} is empty", where=source, usage=True)
    if config.isl is None:
        return tuple(prompts)
    assert tokenizer is not None, "the settings say so"
    return tuple(cut_to_length(prompts, tokenizer, config.isl, source))


def random_prompts(tokenizer: Tokenizer, length: int, count: int, seed: int) -> list[str]:
    """`count` different prompts of `length` tokens each, of words drawn by `seed`.

    They differ from the first word on, so that no server finds one in another's cache. What a model
    says to them is like nothing that people ask: their acceptance means nothing.

    Raises:
        DflashError: the tokenizer has too few words, or no words of so many tokens are found.
    """
    words, generator = tokenizer.words(), random.Random(f"{seed}:{length}")
    found: dict[str, None] = {}
    for _ in range(count * _TRIES):
        if len(found) == count or not words:
            break
        drawn = " ".join(generator.choices(words, k=length + _MARGIN))
        cut = tokenizer.cut(drawn, length)
        if cut is not None:
            found.setdefault(cut)
    if len(found) < count:
        what = f"makes only {len(found):,} random prompts of {length:,} tokens, of {count:,}"
        fix = "give prompts with --prompts NAME=FILE"
        raise DflashError(what, where="the tokenizer", fix=fix, usage=True)
    return list(found)


def cut_to_length(
    prompts: Sequence[str], tokenizer: Tokenizer, length: int, source: str | Path
) -> list[str]:
    """One prompt of `length` tokens for each of `prompts`: its text, then that of the next ones.

    Random tokens would be simpler but distort acceptance.

    Raises:
        DflashError: all prompts together are shorter, or no cut encodes to `length` tokens.
    """
    lengths = [tokenizer.count(prompt) for prompt in prompts]
    if sum(lengths) < length:
        raise DflashError(
            f"all prompts together have {sum(lengths):,} tokens, prompts of {length:,} need more",
            where=source,
            usage=True,
        )
    found = []
    numbers = range(len(prompts))
    for first in numbers:
        parts: list[str] = []
        tokens = 0
        for number in chain(numbers[first:], cycle(numbers)):
            parts.append(prompts[number])
            tokens += lengths[number]
            if tokens >= length + _MARGIN:
                break
        text = tokenizer.cut(_SEAM.join(parts), length)
        if text is None:
            raise DflashError(
                f"prompt {first + 1} cannot be cut to {length} tokens that encode to as many",
                where=source,
                fix="choose another isl",
            )
        found.append(text)
    return found

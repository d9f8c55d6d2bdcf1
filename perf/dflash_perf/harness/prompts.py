"""The prompts of a sweep: a JSON-lines file or a local SPEED-Bench copy, of any length wanted."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dflash_perf.harness.config import SweepConfig
from dflash_perf.harness.speed_bench import read_speed_bench
from dflash_trt.errors import DflashError, one_line
from dflash_trt.text.prompts import read_prompts

_SEAM = "\n\n"
_MARGIN = 8


class Tokenizer:
    """A tokenizer.json: cuts prompts to length, and counts where the server does not."""

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer as Core

        file = _find(path)
        try:
            self._core = Core.from_file(str(file))
        except Exception as error:  # the library raises plain Exception
            raise DflashError(
                f"is not a readable tokenizer: {one_line(error)}", where=file, usage=True
            ) from error
        self._core.no_truncation()
        self._core.no_padding()

    def encode(self, text: str) -> list[int]:
        """Token ids without special tokens."""
        return list(self._core.encode(text, add_special_tokens=False).ids)

    def count(self, text: str) -> int:
        return len(self.encode(text))

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._core.decode(list(ids), skip_special_tokens=False))


def _find(path: Path) -> Path:
    """The tokenizer.json that a file, checkpoint folder or bundle means."""
    for file in (path, path / "tokenizer.json", path / "tokenizer" / "tokenizer.json"):
        if file.is_file():
            return file
    raise DflashError("no tokenizer.json there", where=path, usage=True)


@dataclass(frozen=True, slots=True)
class PromptSet:
    """The prompts, and in which order a run sends them.

    The order depends on the seed alone: every configuration gets the same requests.
    """

    texts: tuple[str, ...]

    @property
    def digest(self) -> str:
        """sha256 of all prompts, in order."""
        digest = hashlib.sha256()
        for prompt in self.texts:
            data = prompt.encode()
            digest.update(len(data).to_bytes(8, "little") + data)
        return digest.hexdigest()

    def order(self, seed: int | str) -> Callable[[int], int]:
        """Maps a request's number to its prompt: all prompts once, then again in a new order."""
        rounds: list[list[int]] = []

        def prompt_of(request: int) -> int:
            turn, place = divmod(request, len(self.texts))
            while len(rounds) <= turn:
                generator = random.Random(f"{seed}:{len(rounds)}")
                rounds.append(generator.sample(range(len(self.texts)), len(self.texts)))
            return rounds[turn][place]

        return prompt_of


def load_prompts(config: SweepConfig, tokenizer: Tokenizer | None) -> PromptSet:
    """The prompts that `config` asks for.

    Raises:
        DflashError: a file that cannot be used, an empty prompt, too little text for `isl`.
    """
    path = Path(config.input_file)
    if config.dataset == "speed-bench":
        prompts = read_speed_bench(path, config.categories)
    else:
        prompts = read_prompts(path)
    for number, prompt in enumerate(prompts, start=1):
        if not prompt.strip():
            raise DflashError(f"prompt {number} is empty", where=path, usage=True)
    if config.isl is not None:
        if tokenizer is None:
            raise DflashError("needs a tokenizer to count with", where="isl", usage=True)
        prompts = cut_to_length(prompts, tokenizer, config.isl, path)
    return PromptSet(tuple(prompts))


def cut_to_length(
    prompts: Sequence[str], tokenizer: Tokenizer, length: int, path: Path
) -> list[str]:
    """As many prompts, each of `length` tokens: one's text, then what follows it in the file.

    Text that people wrote, never random tokens: those distort acceptance.

    Raises:
        DflashError: all of it together is shorter, or text of that length encodes otherwise.
    """
    lengths = [tokenizer.count(prompt) for prompt in prompts]
    if sum(lengths) < length:
        raise DflashError(
            f"all prompts together have {sum(lengths):,} tokens, isl {length:,} needs more",
            where=path,
            usage=True,
        )
    return [_cut(prompts, lengths, first, tokenizer, length, path) for first in range(len(prompts))]


def _cut(
    prompts: Sequence[str],
    lengths: Sequence[int],
    first: int,
    tokenizer: Tokenizer,
    length: int,
    path: Path,
) -> str:
    parts: list[str] = []
    tokens, following = 0, first
    while tokens < length + _MARGIN:
        parts.append(prompts[following % len(prompts)])
        tokens += lengths[following % len(prompts)]
        following += 1
    ids = tokenizer.encode(_SEAM.join(parts))
    # A cut may split what the tokenizer would merge, or a character: a few places are tried.
    for extra in sorted(range(-_MARGIN, _MARGIN + 1), key=abs):
        text = tokenizer.decode(ids[: length + extra])
        if "\ufffd" not in text and tokenizer.count(text) == length:
            return text
    raise DflashError(
        f"prompt {first + 1} cannot be cut to {length} tokens that encode to as many",
        where=path,
        fix="choose another isl",
    )

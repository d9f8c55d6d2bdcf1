"""Prompts that a target writes itself, from the place on where a user would speak.

A chat model has learned what users say: with the template's text up to the user's words as a
prompt, it says something of that kind. Source: Magpie (arXiv 2406.08464).
"""

from __future__ import annotations

import random
import re
import time
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import count, takewhile
from typing import Any

from dflash_trt.decoding import Request
from dflash_trt.decoding.loops import is_looping
from dflash_trt.errors import DflashError
from dflash_trt.pair import LoadedPair
from dflash_trt.sampling.params import SamplingParams
from dflash_trt.text.chat import Message
from dflash_trt.training.observer import WrittenPrompts
from dflash_trt.training.preparation import Preparation
from dflash_trt.training.prompt_sets import LEAST_OWN, OWN, TrainingSet
from dflash_trt.training.rows import LEAST_ANSWER, PromptRow
from dflash_trt.training.work_folder import JsonLines

TEMPERATURE, TOP_P = 1.0, 0.95
MOST_TOKENS = 192
RAW_TOKENS = (4, 32)
"""Without a template a prompt is the beginning of a text, from so many to so many tokens."""
SECOND_TURN = 4
"""Every fourth is a user's second message, behind an answer of the target's."""
ROUND = 32
LEAST_LETTERS = 8
LEAST_SHARE, JUDGED_ROUNDS = 0.1, 4
"""So much of what is written must be of use, else the target is not one that can do this."""
MOST_HOURS_SHARE = 0.5
_SKETCH = 16
_KNOWN, _COMMON = 32, 0.1
_WHERE = f"--prompts {OWN}"
_MARK = "0USER0SPEAKS0HERE0"


@dataclass(slots=True)
class Sieve:
    """What is kept of written prompts: whole, not alike, and in the scripts of the others."""

    left_out: Counter[str] = field(default_factory=Counter)
    _seen: dict[int, list[int]] = field(default_factory=dict)
    _kept: int = 0
    _scripts: Counter[str] = field(default_factory=Counter)

    def takes(self, text: str, ids: Sequence[int]) -> bool:
        """Whether a prompt is kept; an empty `text` is one that did not end."""
        reason = self._fault(text, ids)
        if reason is not None:
            self.left_out[reason] += 1
        return reason is None

    def _fault(self, text: str, ids: Sequence[int]) -> str | None:
        if not text:
            return "unfinished"
        scripts = Counter(_script(one) for one in text if one.isalpha())
        if scripts.total() < LEAST_LETTERS:
            return "too short"
        if is_looping(ids):
            return "repeating itself"
        if self._kept >= _KNOWN:
            known = _COMMON * self._scripts.total()
            foreign = sum(n for one, n in scripts.items() if self._scripts[one] < known)
            if foreign > scripts.total() / 2:
                return "in another script"
        sketch = _sketch(text)
        alike = Counter(other for part in sketch for other in self._seen.get(part, ()))
        if any(2 * count >= len(sketch) for count in alike.values()):
            return "like another"
        for part in sketch:
            self._seen.setdefault(part, []).append(self._kept)
        self._kept += 1
        self._scripts += scripts
        return None


def _script(letter: str) -> str:
    return unicodedata.name(letter, "?").partition(" ")[0]


def _sketch(text: str) -> list[int]:
    """The least hashes of its runs of three words, of which texts that are alike share many."""
    words = re.findall(r"\w+", text.lower())
    runs = {" ".join(words[at : at + 3]) for at in range(max(len(words) - 2, 1))}
    hashes = (blake2b(run.encode("utf-8", "replace"), digest_size=8).digest() for run in runs)
    return sorted(int.from_bytes(one) for one in hashes)[:_SKETCH]


class PromptWriter:
    """Writes prompts with the pair's target, and keeps what it wrote in `lines`.

    Candidate n depends on n, the seed and the target alone, and a round of them is a line: a run
    that was interrupted goes on to the same prompts. `pair` must be idle.
    """

    def __init__(self, preparation: Preparation, pair: LoadedPair, lines: JsonLines) -> None:
        self._preparation, self._pair, self._lines = preparation, pair, lines
        self._tokenizer, self._variables = pair.tokenizer, preparation.renderer.variables
        self._seed, system = preparation.request.seed, preparation.request.system_prompt
        uses_template = preparation.renderer.uses_template
        self._renderer = self._tokenizer.open_renderer() if uses_template else None
        self._system = [] if system is None else [_message("system", system)]
        self._topics = [[_message("system", one)] for one in preparation.topics] or [self._system]
        self._ends = set(pair.bundle.manifest.target.eos_token_ids)
        tokens = self._tokenizer.core.get_added_tokens_decoder()
        self._special = {one for one, token in tokens.items() if token.special}

    def close(self) -> None:
        """Ends the process that renders."""
        if self._renderer is not None:
            self._renderer.close()

    def write(
        self, own: TrainingSet, on_prompts: Callable[[int], None]
    ) -> tuple[list[PromptRow], WrittenPrompts]:
        """The prompts of a set, and what they look like.

        Raises:
            DflashError: what is written is of no use, or takes more than half of the hours.
        """
        rows: list[PromptRow] = []
        sieve, turns, lengths = Sieve(), 0, list[int]()
        began = known = None
        for at in count():  # too few of use end it
            if at == len(self._lines.records):
                if began is None:
                    began, known = time.monotonic(), len(rows)
                self._lines.append({"round": self._write_round(ROUND * at)})
                self._lines.sync()
            before = len(rows)
            for one in self._lines.records[at]["round"]:
                if len(rows) == own.count:
                    break
                # A second message that is of no use leaves the first.
                said = list(takewhile(lambda part: sieve.takes(*part), one["said"]))
                if not said:
                    continue
                texts = [text for text, _ in said]
                texts[1:1] = [one["answer"]] if len(said) > 1 else []
                rows.append(self._row(own.name, len(rows) + 1, texts))
                turns += len(said) > 1
                lengths.append(len(said[-1][1]))
            on_prompts(len(rows) - before)
            if len(rows) == own.count:
                break
            if at + 1 >= JUDGED_ROUNDS and len(rows) < LEAST_SHARE * ROUND * (at + 1):
                what = f"of {ROUND * (at + 1)} prompts that it wrote {len(rows)} are of use"
                reasons = ", ".join(f"{n} {why}" for why, n in sieve.left_out.most_common())
                fix = "pass files of prompts: this target cannot write what its users ask"
                raise DflashError(f"{what} ({reasons})", where=_WHERE, fix=fix)
            if began is not None and known is not None:
                self._check_hours(own.count, known, len(rows) - known, time.monotonic() - began)
        return rows, WrittenPrompts(
            name=own.name,
            left_out=dict(sieve.left_out),
            second_turns=turns,
            lengths=lengths,
            texts=[row.messages[-1]["content"] for row in rows],
        )

    def _check_hours(self, wanted: int, known: int, new: int, taken_s: float) -> None:
        """Raises DflashError where `new` prompts took so long that `wanted` cost half the hours."""
        hours = self._preparation.request.hours
        most_s = MOST_HOURS_SHARE * hours * 3600
        if new and taken_s / new * (wanted - known) > most_s:
            what = f"writing {wanted:,} prompts would take more than half of {hours:g} h"
            fits = known + int(most_s * new / taken_s)
            fix = f"give {f'--prompts self:{fits}, or ' * (fits >= LEAST_OWN)}more hours"
            raise DflashError(what, where=_WHERE, fix=fix)

    def _row(self, name: str, number: int, asked: Sequence[str]) -> PromptRow:
        roles = ("user", "assistant", "user")
        messages: tuple[Message, ...] = tuple(
            {"role": role, "content": text} for role, text in zip(roles, asked, strict=False)
        )
        text = asked[0] if self._renderer is None else None
        where = f"{_WHERE}, prompt {number}"
        return PromptRow(messages=messages, text=text, answer=None, set_name=name, where=where)

    def _write_round(self, first: int) -> list[dict[str, Any]]:
        """ROUND candidates: what a user said once or twice, and the answer between."""
        numbers = range(first, first + ROUND)
        openings = [self._topics[number % len(self._topics)] for number in numbers]
        found: list[dict[str, Any]] = [
            {"said": [said]} for said in self._speak(openings, [2 * number for number in numbers])
        ]
        again = [
            at
            for at, number in enumerate(numbers)
            if number // len(self._topics) % SECOND_TURN == SECOND_TURN - 1
            and self._renderer is not None
            and found[at]["said"][0][0]
        ]
        asked = [_message("user", found[at]["said"][0][0]) for at in again]
        answers = self._answer([[*self._system, one] for one in asked])
        talks = [
            [*openings[at], one, _message("assistant", answer or "?")]
            for at, one, answer in zip(again, asked, answers, strict=True)
        ]
        seconds = self._speak(talks, [2 * numbers[at] + 1 for at in again])
        for at, answer, (text, ids) in zip(again, answers, seconds, strict=True):
            found[at]["said"].append((text if answer else "", ids))
            found[at]["answer"] = answer
        return found

    def _speak(
        self, talks: Sequence[list[Message]], numbers: Sequence[int]
    ) -> list[tuple[str, list[int]]]:
        """What a user says after each conversation, sampled by its number; and its tokens."""
        asked, ends, is_raw = [], self._ends, self._renderer is None
        for talk, number in zip(talks, numbers, strict=True):
            begin, ends = self._before_user(talk)
            draw = random.Random(f"{self._seed} {number}")
            most = draw.randint(*RAW_TOKENS) if is_raw else MOST_TOKENS
            params = SamplingParams(TEMPERATURE, top_p=TOP_P, seed=draw.getrandbits(63))
            asked.append((begin, most, params))
        said = self._continue(asked, ends)
        return [(self._text(ids) if is_whole or is_raw else "", ids) for ids, is_whole in said]

    def _answer(self, talks: Sequence[list[Message]]) -> list[str]:
        """The target's greedy answers; empty for one that did not end."""
        asked = []
        for talk in talks:
            assert self._renderer is not None
            text = self._renderer.render(talk, self._variables)
            ids = tuple(self._tokenizer.encode(text, special=False))
            asked.append((ids, self._preparation.request.answer_tokens, SamplingParams()))
        said = self._continue(asked, self._ends)
        return [self._text(ids) if whole and not is_looping(ids) else "" for ids, whole in said]

    def _continue(
        self, asked: Sequence[tuple[tuple[int, ...], int, SamplingParams]], ends: set[int]
    ) -> list[tuple[list[int], bool]]:
        """Tokens without the one that ended them, and whether one did; nothing where none fits."""
        said: list[tuple[list[int], bool]] = [([], False)] * len(asked)
        room = self._preparation.max_length - LEAST_ANSWER
        fitting = [at for at, (ids, *_) in enumerate(asked) if len(ids) < room]
        requests = [
            Request(
                prompt_ids=asked[at][0],
                max_tokens=min(asked[at][1], room - len(asked[at][0])),
                sampling=asked[at][2],
                stop_token_ids=tuple(sorted(ends - self._ends)),
            )
            for at in fitting
        ]
        for at, result in zip(fitting, self._pair.run(requests), strict=True):
            ids = [one for one in result.token_ids if one not in ends]
            said[at] = (ids, len(ids) < len(result.token_ids))
        return said

    def _before_user(self, talk: Sequence[Message]) -> tuple[tuple[int, ...], set[int]]:
        """The tokens before a user's words, at least one, and those that end these."""
        text, ends = "", set[int]()
        if self._renderer is not None:
            text = self._renderer.render([*talk, _message("user", _MARK)], self._variables)
            text, mark, after = text.rpartition(_MARK)
            ends = self._special.intersection(self._tokenizer.encode(after, special=False)[:1])
            if not (mark and ends):
                what = "the chat template ends a user's words with no special token"
                if not mark:
                    what = "the chat template does not show a user's words as they are"
                raise DflashError(what, where=_WHERE, fix="pass files of prompts")
        begin = tuple(self._tokenizer.encode(text, special=self._renderer is None))
        return begin or tuple(sorted(self._ends))[:1], self._ends | ends

    def _text(self, ids: Sequence[int]) -> str:
        """Empty where a special token stands in it: a user says none."""
        if not self._special.isdisjoint(ids):
            return ""
        return str(self._tokenizer.core.decode(list(ids))).strip()


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}

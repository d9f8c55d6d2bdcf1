"""Answers: what the target says to the prompts; given, asked of a server, or generated here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from dflash_trt.backends.base import TargetCall, hold_positions
from dflash_trt.decoding import Request, TokenEvent
from dflash_trt.decoding.loops import LOOP_TOKENS, is_looping, loop_end
from dflash_trt.decoding.scores import sampling_input
from dflash_trt.pair import LoadedPair
from dflash_trt.sampling.params import SamplingParams
from dflash_trt.training.json_lines import JsonLines
from dflash_trt.training.render import RenderedRow

# Requests that are submitted together: enough that slots stay full while some end.
_ROUND = 4


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """How answers are made.

    Args:
        answer_tokens: most tokens of one.
        max_length: most tokens of a prompt and its answer.
        seed: with the row, the seed of its sampling.
    """

    answer_tokens: int
    max_length: int
    temperature: float
    seed: int

    def room(self, row: RenderedRow) -> int:
        """Most tokens of this row's answer."""
        return min(self.answer_tokens, self.max_length - len(row.prompt_ids))

    def sampling(self, row: RenderedRow) -> SamplingParams:
        """Depends on nothing but the row and the seed, so that a resumed run says the same."""
        seed = (int(row.row_id, 16) ^ self.seed) & (2**63 - 1)
        return SamplingParams(temperature=self.temperature, seed=seed)


class Answerer(Protocol):
    """Says what the target answers."""

    @property
    def round_rows(self) -> int:
        """How many rows are worth asking for together."""
        ...

    def answer(
        self, rows: Sequence[RenderedRow], on_answer: Callable[[int, Sequence[int]], None]
    ) -> None:
        """Calls `on_answer(index, token_ids)` for each row, in any order; the token that ended an
        answer is its last."""
        ...


class LocalAnswerer:
    """The bundle in this process."""

    def __init__(self, pair: LoadedPair, options: AnswerOptions) -> None:
        self._pair, self._options = pair, options

    @property
    def round_rows(self) -> int:
        return _ROUND * self._pair.bundle.manifest.limits.max_batch

    def answer(
        self, rows: Sequence[RenderedRow], on_answer: Callable[[int, Sequence[int]], None]
    ) -> None:
        requests = [
            Request(
                prompt_ids=row.prompt_ids,
                max_tokens=self._options.room(row),
                sampling=self._options.sampling(row),
            )
            for row in rows
        ]
        looked_at = [0] * len(rows)
        said: list[list[int]] = [[] for _ in rows]

        def hear(index: int, event: TokenEvent) -> bool:
            """Keeps an answer; ends one that repeats itself, as no more is learned from it."""
            ids = said[index]
            ids += event.token_ids
            if event.result is not None:
                on_answer(index, event.result.token_ids)
                return False
            if len(ids) - looked_at[index] < LOOP_TOKENS:
                return False
            looked_at[index] = len(ids)
            return is_looping(ids)

        self._pair.run(requests, hear)


class AnswerStore:
    """Answers by row, on disk; those that were given need no asking.

    One that repeats itself ends where LOOP_TOKENS of its tokens have come LOOP_TIMES times: any
    draft foresees the rest.
    """

    def __init__(self, lines: JsonLines, given: Iterable[RenderedRow]) -> None:
        self._lines = lines
        self._answers: dict[str, tuple[int, ...]] = {
            row.row_id: _without_loop(row.answer_ids) for row in given if row.answer_ids is not None
        }
        for record in lines.records:
            self._answers[str(record["row"])] = _without_loop(record["ids"])

    def __contains__(self, row: RenderedRow) -> bool:
        return row.row_id in self._answers

    def __getitem__(self, row: RenderedRow) -> tuple[int, ...]:
        return self._answers[row.row_id]

    def fill(
        self,
        rows: Sequence[RenderedRow],
        answerer: Answerer,
        on_tokens: Callable[[int], None],
        has_time: Callable[[], bool] = lambda: True,
    ) -> int:
        """Asks for what is missing of `rows`, in order, while there is time; returns how many of
        them, from the first on, are answered."""
        missing = [row for row in rows if row not in self]
        size = answerer.round_rows
        for first in range(0, len(missing), size):
            if not has_time():
                break
            some = missing[first : first + size]

            def keep(index: int, ids: Sequence[int], some: Sequence[RenderedRow] = some) -> None:
                row_id = some[index].row_id
                self._answers[row_id] = kept = _without_loop(ids)
                self._lines.append({"row": row_id, "ids": list(kept)})
                on_tokens(len(ids))

            answerer.answer(some, keep)
            self._lines.sync()
        return next((at for at, row in enumerate(rows) if row not in self), len(rows))


def _without_loop(ids: Sequence[int]) -> tuple[int, ...]:
    return tuple(ids[: loop_end(ids)])


def agreement(pair: LoadedPair, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> float:
    """Share of an answer's tokens that are the target's likeliest after what stands before them.

    The pair must be idle. Uses slot 0 and the baseline graph.
    """
    executor = pair.executor
    ids = np.array([*prompt_ids, *answer_ids], np.int64)
    chunk = executor.limits.prefill_chunk
    hold_positions(executor, len(ids))
    greedy = sampling_input(executor.limits, [SamplingParams()])
    choices = []
    for start in range(0, len(ids) - 1, chunk):
        part = ids[start : min(start + chunk, len(ids) - 1)]
        rows, starts = np.arange(len(part)), np.array([start])
        call = TargetCall(
            "target_only", 0, part[None], starts, rows[None], sampling=greedy, is_chunk=True
        )
        choices.append(executor.forward(call).choice_ids[0].copy())
    executor.release_slots(0)
    said = np.concatenate(choices)[len(prompt_ids) - 1 :]
    return float((said == ids[len(prompt_ids) :]).mean())

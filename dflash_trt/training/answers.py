"""Answers: what the target says to the prompts; given, asked of a server, or generated here."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from dflash_trt.backends.base import TargetCall, hold_positions
from dflash_trt.bundle.bundle import Bundle
from dflash_trt.decoding import Request, TokenEvent
from dflash_trt.decoding.loops import LOOP_TOKENS, is_looping, loop_end
from dflash_trt.decoding.scores import sampling_input
from dflash_trt.errors import DflashError
from dflash_trt.pair import LoadedPair
from dflash_trt.sampling.params import SamplingParams
from dflash_trt.training.endpoint import AnswerOptions, AnswerServer
from dflash_trt.training.features import TokenRow
from dflash_trt.training.hours_plan import check_hours
from dflash_trt.training.observer import TrainingWatch
from dflash_trt.training.preparation import Preparation
from dflash_trt.training.rows import RenderedRow, RenderedRows
from dflash_trt.training.training_request import TrainRequest
from dflash_trt.training.work_folder import JsonLines, WorkFolder

CHECKED_PROMPTS, CHECKED_TOKENS = 4, 16
LEAST_AGREEMENT = 0.8
"""Of an endpoint's greedy tokens that must be the target's: rounding and ties part few."""
DOUBTED_ROWS = 8
DOUBTED_AGREEMENT = 0.9
"""Below, answers are called a stranger's; sampled ones are compared with half of it."""
LEAST_MEASURED = 8
"""Held-out answers without a loop: with fewer, those with one are measured as well."""
JUDGED_S = 40.0
"""After so long the hours are judged by the answers that have begun…"""
LIKELY_SHARE = 0.5
"""…which are taken to fill so much of their room."""
_ROUND = 4
"""Requests a slot that are submitted together: enough that slots stay full while some end."""


@dataclass(frozen=True, slots=True)
class LocalAnswerer:
    """The bundle in this process; `on_step` hears of all tokens so far, and answers that ended."""

    pair: LoadedPair
    options: AnswerOptions
    on_step: Callable[[int, int], None] = lambda tokens, ended: None

    @property
    def round_rows(self) -> int:
        """How many rows are worth asking for together."""
        return _ROUND * self.pair.bundle.manifest.limits.max_batch

    def answer(
        self, rows: Sequence[RenderedRow], on_answer: Callable[[int, Sequence[int]], None]
    ) -> None:
        """Calls `on_answer(index, token_ids)` for each row, in any order; the token that ended an
        answer is its last."""
        options = self.options
        requests = [
            Request(
                prompt_ids=row.prompt_ids,
                max_tokens=options.room(row),
                sampling=options.sampling(row),
            )
            for row in rows
        ]
        looked_at, counts = [0] * len(rows), [0, 0]
        said: list[list[int]] = [[] for _ in rows]

        def hear(index: int, event: TokenEvent) -> bool:
            """Keeps an answer; ends one that repeats itself, as no more is learned from it."""
            ids = said[index]
            ids += event.token_ids
            counts[0] += len(event.token_ids)
            counts[1] += event.result is not None
            self.on_step(*counts)
            if event.result is not None:
                on_answer(index, event.result.token_ids)
                return False
            if len(ids) - looked_at[index] < LOOP_TOKENS:
                return False
            looked_at[index] = len(ids)
            return is_looping(ids)

        self.pair.run(requests, hear)


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
        answerer: LocalAnswerer | AnswerServer,
        on_tokens: Callable[[int], None],
        has_time: Callable[[], bool] = lambda: True,
    ) -> int:
        """Asks for what is missing of `rows`, in order, while there is time; returns how many of
        them, from the first on, are answered."""
        missing = [row for row in rows if row not in self]
        for first in range(0, len(missing), answerer.round_rows):
            if not has_time():
                break
            some = missing[first : first + answerer.round_rows]

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


def open_target(bundle: Bundle, request: TrainRequest) -> LoadedPair:
    """Opens what says prompts and answers: the target's own graph."""
    speculates = request.start is not None
    return LoadedPair(
        bundle, threads=request.threads, speculation=speculates, graphs=("target_only",)
    )


class AnswerStage:
    """Answers to prompts to train on and to those held out; closed by `with`.

    Attributes:
        store: what is known so far, on disk.
    """

    def __init__(
        self,
        preparation: Preparation,
        work: WorkFolder,
        bundle: Bundle,
        rows: RenderedRows,
        watch: TrainingWatch,
    ) -> None:
        self._preparation, self._watch, self._rows = preparation, watch, rows.train
        self._request = preparation.request
        self._pair = open_target(bundle, self._request)
        stage = work.stage("answers", preparation.answer_parts())
        self._lines = JsonLines(stage.folder / "answers.jsonl")
        self.store = AnswerStore(self._lines, [*rows.train, *rows.held_out])
        self._answerer: LocalAnswerer | AnswerServer | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._pair.close()
        self._lines.__exit__()

    def token_row(self, row: RenderedRow) -> TokenRow:
        return TokenRow(row.prompt_ids, self.store[row])

    def measure(self) -> float:
        """Answers the first prompts that have no answer; returns the seconds that one takes.

        Raises:
            DflashError: what answers is not the target, or the hours will not do.
        """
        batch = self._pair.bundle.manifest.limits.max_batch
        count = max(batch, self._preparation.settings.rows)
        missing = [row for row in self._rows if row not in self.store][:count]
        if not missing:
            return 0.0
        answerer, started = self._open(), time.perf_counter()
        rooms = [self._preparation.answers.room(row) for row in missing]

        def judge(tokens: int, ended: int) -> None:
            """Gives up early: whoever gave too few hours need not wait for all answers."""
            seconds, count = time.perf_counter() - started, len(missing)
            if seconds < JUDGED_S:
                return
            row_s = seconds / count  # at least
            if tokens and ended < count / 4:  # those that end first are the short ones
                row_s = max(row_s, LIKELY_SHARE * sum(rooms) / count * seconds / tokens)
            check_hours(self._request, row_s)

        if isinstance(answerer, LocalAnswerer):
            self._answerer = replace(answerer, on_step=judge)
        self.answer(missing, lambda: True)
        self._answerer = answerer
        return (time.perf_counter() - started) / len(missing)

    def answer(self, rows: Sequence[RenderedRow], has_time: Callable[[], bool]) -> int:
        """Answers what is missing; returns how many of `rows`, from the first on, are answered."""
        missing = [row for row in rows if row not in self.store]
        if not missing:
            return len(rows)
        answerer = self._open()
        room = sum(self._preparation.answers.room(row) for row in missing)
        self._watch.stage(f"answering {len(missing):,} prompts", room, "tokens")
        return self.store.fill(rows, answerer, self._watch.advance, has_time)

    def warn_of_strangers(self, rows: Sequence[RenderedRow]) -> None:
        """Warns where answers that were not made here are not what the target would say."""
        if not self._request.given_answers and self._request.url is None:
            return
        self._watch.stage("comparing answers with the target", None)
        share = self._agreement([(row, self.store[row]) for row in rows[:DOUBTED_ROWS]])
        is_greedy = self._request.temperature == 0
        if share < DOUBTED_AGREEMENT * (1 if is_greedy else 0.5):
            self._watch.warn(
                f"only {100 * share:.0f} % of the answers' tokens are the target's own choice: a "
                "draft learns them, but serving will not say them; leave the answers out, and the "
                "target gives its own"
            )

    def choose_measured(self, rows: Sequence[RenderedRow]) -> list[RenderedRow]:
        """Those of the held-out `rows` that a draft is measured on: not those whose answers repeat
        themselves, which any draft foresees, unless there are few others."""
        others = [row for row in rows if not is_looping(self.store[row])]
        measured = others if len(others) >= min(len(rows), LEAST_MEASURED) else list(rows)
        if len(others) < len(rows):
            self._watch.say(
                f"{len(rows) - len(others)} of {len(rows)} held-out answers repeat themselves, "
                f"which any draft foresees: {len(measured)} answers are measured on"
            )
        return measured

    def _agreement(self, said: Sequence[tuple[RenderedRow, Sequence[int]]]) -> float:
        shares = [agreement(self._pair, row.prompt_ids, ids) for row, ids in said]
        return sum(shares) / len(shares)

    def _open(self) -> LocalAnswerer | AnswerServer:
        """What answers, once it has proved to be the target."""
        if self._answerer is not None:
            return self._answerer
        preparation, url = self._preparation, self._request.url
        if url is None:
            self._answerer = LocalAnswerer(self._pair, preparation.answers)
            return self._answerer
        endpoint = AnswerServer(
            url,
            self._request.endpoint_model,
            preparation.answers,
            preparation.target.open_tokenizer(),
            preparation.renderer.variables,
            preparation.target.spec.eos_token_ids,
        )
        self._watch.stage("asking the server who it is", None)
        asked = self._rows[:CHECKED_PROMPTS]
        share = self._agreement([(one, endpoint.ask(one, CHECKED_TOKENS)) for one in asked])
        if share < LEAST_AGREEMENT:
            raise DflashError(
                f"serves another model: of its greedy tokens on {len(asked)} prompts only "
                f"{100 * share:.0f} % are the target's",
                where=url,
                fix="serve the target, or pass what is served as --target",
            )
        self._answerer = endpoint
        return endpoint

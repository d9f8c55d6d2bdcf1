"""The stage that answers: opens what answers, keeps what was said, and doubts whether it fits."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Self

from dflash_trt.bundle.bundle import Bundle
from dflash_trt.decoding.loops import is_looping
from dflash_trt.errors import DflashError
from dflash_trt.pair import LoadedPair
from dflash_trt.training.answers import Answerer, AnswerStore, LocalAnswerer, agreement
from dflash_trt.training.endpoint import AnswerServer
from dflash_trt.training.features import TokenRow
from dflash_trt.training.json_lines import JsonLines
from dflash_trt.training.observer import TrainingWatch
from dflash_trt.training.preparation import Preparation
from dflash_trt.training.render import RenderedRow, RenderedRows
from dflash_trt.training.work_folder import WorkFolder

CHECKED_PROMPTS, CHECKED_TOKENS = 4, 16
LEAST_AGREEMENT = 0.8
"""Of an endpoint's greedy tokens that must be the target's: rounding and ties part few."""
DOUBTED_ROWS = 8
DOUBTED_AGREEMENT = 0.9
"""Below, answers are called a stranger's; sampled ones are compared with half of it."""

LEAST_MEASURED = 8
"""Held-out answers without a loop: with fewer, those with one are measured as well."""


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
        request = preparation.request
        self._pair = LoadedPair(
            bundle,
            threads=request.threads,
            speculation=request.start is not None,
            graphs=("target_only",),
        )
        stage = work.stage("answers", preparation.answer_parts(), keep_others=True)
        self._lines = JsonLines(stage.folder / "answers.jsonl")
        self.store = AnswerStore(self._lines, [*rows.train, *rows.held_out])
        self._answerer: Answerer | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._pair.close()
        self._lines.close()

    def token_row(self, row: RenderedRow) -> TokenRow:
        return TokenRow(row.prompt_ids, self.store[row])

    def measure(self) -> float:
        """Answers the first prompts that have no answer; returns the seconds that one takes.

        Raises:
            DflashError: what answers is not the target.
        """
        count = max(
            self._pair.bundle.manifest.limits.max_batch, self._preparation.recipe.settings.rows
        )
        missing = [row for row in self._rows if row not in self.store][:count]
        if not missing:
            return 0.0
        answerer = self._open()
        self._watch.stage("answering the first prompts", None)
        started = time.perf_counter()
        self.store.fill(missing, answerer, lambda tokens: None)
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
        foreign = [
            row
            for row in rows
            if row.answer_ids is not None or self._preparation.request.endpoint.url is not None
        ][:DOUBTED_ROWS]
        if not foreign:
            return
        self._watch.stage("comparing answers with the target", None)
        shares = [agreement(self._pair, row.prompt_ids, self.store[row]) for row in foreign]
        share = sum(shares) / len(shares)
        is_greedy = self._preparation.request.data.temperature == 0
        if share < DOUBTED_AGREEMENT * (1 if is_greedy else 0.5):
            self._watch.warn(
                f"only {100 * share:.0f} % of the answers' tokens are the target's own choice: a "
                "draft learns them, but serving will not say them; leave the answers out, and the "
                "target gives its own"
            )

    def choose_measured(self, rows: Sequence[RenderedRow]) -> list[RenderedRow]:
        """Those of the held-out `rows` that a draft is measured on: not those whose answers repeat
        themselves, which any draft foresees."""
        others = [row for row in rows if not is_looping(self.store[row])]
        looping = f"{len(rows) - len(others)} of {len(rows)} held-out answers repeat themselves"
        if len(others) >= min(len(rows), LEAST_MEASURED):
            if len(others) < len(rows):
                self._watch.say(f"{looping}, which any draft foresees: they are not measured on")
            return others
        self._watch.warn(
            f"{looping}, which any draft foresees: acceptance lengths will read high; "
            "lower --set answer-tokens"
        )
        return list(rows)

    def _open(self) -> Answerer:
        """What answers, once it has proved to be the target."""
        if self._answerer is not None:
            return self._answerer
        preparation = self._preparation
        if preparation.request.endpoint.url is None:
            self._answerer = LocalAnswerer(self._pair, preparation.answers)
            return self._answerer
        endpoint = AnswerServer(
            preparation.request.endpoint,
            preparation.answers,
            preparation.target.open_tokenizer(),
            preparation.renderer.variables,
            preparation.target.spec.eos_token_ids,
        )
        self._watch.stage("asking the server who it is", None)
        shares = []
        for row in self._rows[:CHECKED_PROMPTS]:
            said = endpoint.ask(row, greedy_tokens=CHECKED_TOKENS)
            shares.append(agreement(self._pair, row.prompt_ids, said))
        share = sum(shares) / len(shares)
        if share < LEAST_AGREEMENT:
            raise DflashError(
                f"serves another model: of its greedy tokens on {len(shares)} prompts only "
                f"{100 * share:.0f} % are the target's",
                where=preparation.request.endpoint.url,
                fix="serve the target, or pass what is served as --target",
            )
        self._answerer = endpoint
        return endpoint

"""Trials: answers replayed with one thing changed, and what that makes of the acceptance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dflash_trt.bundle.bundle import Bundle
from dflash_trt.core.progress import Progress, SilentProgress
from dflash_trt.decoding.replay import Acceptance, Answer, Replay
from dflash_trt.decoding.replay.replay_graphs import ContextRows
from dflash_trt.proof.diagnosis.cause import Cause
from dflash_trt.proof.diagnosis.changes import Change, list_changes, list_masks
from dflash_trt.proof.diagnosis.gain import Gain, count, paired_gain
from dflash_trt.proof.twins import check_twins

SCREENED = 8
"""Answers on which every change is tried; the promising ones are tried on all."""

PROMISING = 0.01
MASK_TOKENS = 24
"""Tokens of each answer that mask tokens are tried on first: there may be many of them."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A change, the acceptance length with it, and what it gains on the answers it was tried on."""

    cause: Cause
    change: str
    acceptance_length: float | None
    gain: Gain
    answers: int

    def to_json(self) -> dict[str, Any]:
        return {
            "cause": self.cause.value,
            "change": self.change,
            "acceptance_length": self.acceptance_length,
            "gain": self.gain.to_json(),
            "answers": self.answers,
        }


class TrialBench:
    """Answers on a bundle, with their contexts, on which changes are tried.

    Attributes:
        base: the answers as the bundle is.
    """

    def __init__(
        self,
        bundle: Bundle,
        answers: Sequence[Answer],
        *,
        threads: int = 1,
        progress: Progress | None = None,
    ) -> None:
        self._bundle, self._answers, self._threads = bundle, answers, threads
        self._progress = progress or SilentProgress()
        with Replay(bundle, threads=threads) as replay:
            self.contexts = replay.inject(answers, self._progress)
            self.base = replay.ask(answers, self.contexts, self._progress)

    def try_all(self) -> list[Trial]:
        """Every change of the bundle's graphs, and the most promising mask tokens."""
        longest = max(len(answer.known_ids) for answer in self._answers)
        changes = [*list_changes(self._bundle, longest), *self._promising_masks()]
        self._progress.stage("changing one thing at a time", len(changes), "steps")
        trials = []
        for change in changes:
            trials.append(self._try(change))
            self._progress.advance(1)
        return trials

    def try_others_context(self) -> Trial:
        """Each answer with the context of another: a draft that uses features loses by it."""
        contexts = [
            _stretched(self.contexts[index - 1], len(answer.known_ids))
            for index, answer in enumerate(self._answers)
        ]
        with Replay(self._bundle, threads=self._threads) as replay:
            changed = replay.ask(self._answers, contexts)
        return self._trial(Cause.DRAFT_WEIGHTS, "the context of another answer", changed)

    def try_twin(self, twin: Bundle) -> list[Trial]:
        """The target's features, then the draft, of the pair in high precision.

        Raises:
            DflashError: it is no twin.
        """
        check_twins(self._bundle, twin)
        with (
            Replay(twin, threads=self._threads) as other,
            Replay(self._bundle, threads=self._threads) as own,
        ):
            features = own.ask(self._answers, other.inject(self._answers))
            draft = other.ask(self._answers, self.contexts)
        return [
            self._trial(Cause.QUANTISED_TARGET, f"features of {twin.folder}", features),
            self._trial(Cause.QUANTISED_DRAFT, f"draft of {twin.folder}", draft),
        ]

    def _try(self, change: Change) -> Trial:
        """On a few answers, and on all if that promises something."""
        few = self._answers[:SCREENED]
        with Replay(self._bundle, threads=self._threads, edits=change.edits) as replay:
            trial = self._measure(replay, change, len(few))
            if trial.gain.value > PROMISING and len(few) < len(self._answers):
                trial = self._measure(replay, change, len(self._answers))
        return trial

    def _measure(self, replay: Replay, change: Change, answers: int) -> Trial:
        some = self._answers[:answers]
        if change.is_injected:
            changed = replay.measure(some)
        else:
            mask = change.mask_token_id
            changed = replay.ask(some, self.contexts[:answers], mask_token_id=mask)
        return self._trial(change.cause, change.text, changed)

    def _trial(self, cause: Cause, change: str, changed: Acceptance) -> Trial:
        base = count(self.base.per_answer[: changed.answers])
        gain = paired_gain(base, count(changed.per_answer))
        return Trial(cause, change, changed.acceptance_length, gain, changed.answers)

    def _promising_masks(self) -> list[Change]:
        """The two best of many, on a few tokens of a few answers."""
        masks = list_masks(self._bundle)
        if len(masks) <= 2:
            return masks
        few = [
            Answer(answer.prompt_ids, answer.token_ids[:MASK_TOKENS])
            for answer in self._answers[:SCREENED]
        ]
        self._progress.stage("trying mask tokens", len(masks), "steps")
        found: list[tuple[float, Change]] = []
        with Replay(self._bundle, threads=self._threads) as replay:
            for mask in masks:
                token = mask.mask_token_id
                seen = replay.ask(few, self.contexts[: len(few)], mask_token_id=token)
                found.append((seen.acceptance_length or 0.0, mask))
                self._progress.advance(1)
        found.sort(key=lambda pair: pair[0], reverse=True)
        return [mask for _, mask in found[:2]]


def _stretched(context: ContextRows, length: int) -> ContextRows:
    """A context's rows over and over, `length` in all."""
    return {
        name: np.concatenate([rows] * -(-length // max(len(rows), 1)))[:length]
        for name, rows in context.items()
    }

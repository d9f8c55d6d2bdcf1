"""Walks the speculative loop's chain of anchors over known answers, several in one batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, TypeVar

import numpy as np

from dflash_trt.backends.base import FloatArray, Int64Array
from dflash_trt.core.progress import Progress
from dflash_trt.decoding.replay.replay_graphs import ContextRows, HostCaches, ReplayGraphs
from dflash_trt.decoding.replay.replayed_acceptance import UNKNOWN, Answer, StepTable
from dflash_trt.decoding.statistics import RequestStatistics, StatisticsRecorder

Number = TypeVar("Number", int, float)


@dataclass(slots=True)
class _Walker:
    """An answer that is walked over; `anchor` is the position of the newest settled token."""

    index: int
    answer: Answer
    ids: Int64Array
    context: ContextRows
    anchor: int
    recorder: StatisticsRecorder = field(default_factory=lambda: StatisticsRecorder(0.0))

    @property
    def known(self) -> int:
        """Tokens of the answer behind the anchor."""
        return len(self.ids) - 1 - self.anchor


class ChainWalk:
    """Replays `answers` with `graphs`: a block at an anchor, then on from the last token kept.

    As decoding is lossless, the target would say the answer's tokens again; so a draft is accepted
    while it equals them (arXiv 2602.06036).

    Args:
        contexts: gives the draft's context of the answer at an index.
        sequences: how many share a pass.
        block_size: rows of a block, anchor included.
        mask_token_id: what blocks are filled with, None for the bundle's.
    """

    def __init__(
        self,
        graphs: ReplayGraphs,
        answers: Sequence[Answer],
        contexts: Callable[[int], ContextRows],
        *,
        sequences: int,
        block_size: int,
        mask_token_id: int | None = None,
    ) -> None:
        self._graphs, self._answers, self._contexts = graphs, answers, contexts
        self._sequences, self._block_size = sequences, block_size
        self._mask_token_id = mask_token_id
        self._rows: list[dict[str, Any]] = []

    def run(self, progress: Progress) -> tuple[StepTable, list[RequestStatistics]]:
        """Every step, and each answer's counts in their order."""
        # The longest first: the caches' length, which attention pays for, can only fall.
        order = sorted(range(len(self._answers)), key=self._length, reverse=True)
        waiting, finished = deque(order), dict[int, RequestStatistics]()
        walkers: list[_Walker] = []
        caches: HostCaches | None = None
        while waiting or walkers:
            arrived: list[_Walker] = []
            while waiting and len(walkers) + len(arrived) < self._sequences:
                walker = self._start(waiting.popleft())
                if walker.known:
                    arrived.append(walker)
                else:
                    finished[walker.index] = self._finish(walker)
            if not walkers and not arrived:
                break
            caches = self._seat(caches, walkers, arrived)
            walkers += arrived
            for first, run in self._batches(walkers):
                progress.advance(self._step(caches, first, run))
            for slot in reversed(range(len(walkers))):
                if not walkers[slot].known:
                    walker, last = walkers[slot], walkers.pop()
                    finished[walker.index] = self._finish(walker)
                    if last is not walker:
                        walkers[slot] = last
                        caches.fill(slot, last.context)
        table = StepTable.join(self._rows, self._block_size)
        return table, [finished[index] for index in range(len(self._answers))]

    def _length(self, index: int) -> int:
        answer = self._answers[index]
        return len(answer.prompt_ids) + len(answer.token_ids)

    def _start(self, index: int) -> _Walker:
        answer = self._answers[index]
        ids = np.array(answer.known_ids, np.int64)
        # Without an output there is no anchor, and nothing behind the prompt either.
        anchor = len(answer.prompt_ids) if len(answer.token_ids) else len(ids) - 1
        has_steps = anchor < len(ids) - 1
        context = self._contexts(index) if has_steps else {}
        context = {name: rows[: len(ids) - 1] for name, rows in context.items()}
        return _Walker(index, answer, ids, context, anchor)

    def _seat(
        self, caches: HostCaches | None, walkers: list[_Walker], arrived: list[_Walker]
    ) -> HostCaches:
        """Puts contexts into slots; caches twice as long as needed are made anew."""
        longest = max(len(walker.ids) for walker in (*walkers, *arrived)) + self._block_size
        newcomers = list(enumerate(arrived, start=len(walkers)))
        if caches is None or caches.length >= 2 * max(longest, 128):
            caches = self._graphs.make_caches(self._sequences, longest)
            newcomers = list(enumerate([*walkers, *arrived]))
        for slot, walker in newcomers:
            caches.fill(slot, walker.context)
        return caches

    def _batches(self, walkers: list[_Walker]) -> Iterator[tuple[int, list[_Walker]]]:
        """Neighbours whose blocks are equally long; at the context's end they are shorter."""
        first, most = 0, self._graphs.limits.max_seq_len
        for _, run in groupby(walkers, lambda one: min(self._block_size, most - one.anchor)):
            together = list(run)
            yield first, together
            first += len(together)

    def _step(self, caches: HostCaches, first: int, walkers: list[_Walker]) -> int:
        """One draft pass over `walkers`; returns how many tokens their steps emitted."""
        rows = min(self._block_size, self._graphs.limits.max_seq_len - walkers[0].anchor)
        if rows > 1:
            anchors = np.array([one.ids[one.anchor] for one in walkers])
            starts = np.array([one.anchor for one in walkers])
            drafts, logits = self._graphs.run_draft(
                caches, first, anchors, starts, rows, self._mask_token_id
            )
        else:
            drafts = np.zeros((len(walkers), 0), np.int64)
            logits = np.zeros((len(walkers), 0, self._graphs.vocab_size), np.float32)
        emitted = 0
        for offset, walker in enumerate(walkers):
            start = walker.anchor
            emitted += self._take(walker, rows, drafts[offset], logits[offset])
            # The block's own rows lie where the target's features were.
            caches.restore(first + offset, walker.context, start, start + rows)
        return emitted

    def _take(self, walker: _Walker, rows: int, drafts: Int64Array, logits: FloatArray) -> int:
        """Settles a step as the runtime does; returns the tokens that it emitted."""
        start, known, slots = walker.anchor, walker.known, self._block_size - 1
        follows = walker.ids[start + 1 : start + 1 + self._block_size]
        compared = min(len(drafts), len(follows))
        equal = drafts[:compared] == follows[:compared]
        matched = compared if equal.all() else int(equal.argmin())
        # Where all that is known was matched, the loop settled more than it could emit.
        verified = matched + 1
        emitted = min(verified, known)
        trials, accepted = walker.recorder.record_step(rows, verified, emitted)
        self._rows.append(
            {
                "answer": walker.index,
                "position": start,
                "trials": trials,
                "accepted": accepted,
                "emitted": emitted,
                "known": known,
                "draft_ids": _pad(drafts.tolist(), slots, UNKNOWN),
                "token_ids": _pad(follows.tolist(), self._block_size, UNKNOWN),
                "rank": _pad(_ranks(logits[:compared], follows[:compared]), slots, UNKNOWN),
                "probability": _pad(_confidence(logits), slots, 0.0),
            }
        )
        walker.anchor += emitted
        return emitted

    def _finish(self, walker: _Walker) -> RequestStatistics:
        answer = walker.answer
        return walker.recorder.freeze(len(answer.prompt_ids), len(answer.token_ids))


def _ranks(logits: FloatArray, tokens: Int64Array) -> list[int]:
    """How many of each row [n,V] are higher than its token's."""
    own = np.take_along_axis(logits, tokens[:, None], axis=1)
    ranks: list[int] = (logits > own).sum(axis=1).tolist()
    return ranks


def _confidence(logits: FloatArray) -> list[float]:
    """The softmax of the highest of each row [n,V]."""
    if not len(logits):
        return []
    highest = logits.max(axis=1, keepdims=True)
    confidence: list[float] = (1 / np.exp(logits - highest).sum(axis=1)).tolist()
    return confidence


def _pad(values: list[Number], width: int, filler: Number) -> list[Number]:
    return values + [filler] * (width - len(values))

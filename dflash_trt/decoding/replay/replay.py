"""Replay: known answers, run through a bundle's own graphs without the speculative loop."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Self, TypeVar

import numpy as np

from dflash_trt.backends.base import FloatArray, Int64Array
from dflash_trt.bundle.bundle import Bundle
from dflash_trt.core.limits import Count, Threads, choose_block
from dflash_trt.core.progress import Progress, SilentProgress
from dflash_trt.core.validation import check_value
from dflash_trt.decoding.replay.edits import Edits
from dflash_trt.decoding.replay.replay_graphs import ContextRows, HostCaches, ReplayGraphs
from dflash_trt.decoding.replay.replayed_acceptance import (
    UNKNOWN,
    Acceptance,
    Answer,
    StepTable,
    check_ids,
    summarise,
)
from dflash_trt.decoding.statistics import StatisticsRecorder
from dflash_trt.errors import DflashError

Number = TypeVar("Number", int, float)


class Replay:
    """An opened CPU bundle that answers are replayed on; closed by `with`.

    As decoding is lossless, known tokens need not be decoded again: one pass of the target over
    prompt and answer gives the draft its whole context, and the draft alone is asked at the
    anchors at which the speculative loop would have asked it. Figures equal the loop's.

    Args:
        bundle: float32 or quantised, for the CPU.
        threads: intra-op threads of ONNX Runtime.
        sequences: answers in one draft pass, whose weights are read once for all.
        block_size: rows of a block, anchor included; None is the bundle's.
        edits: changes to the graphs, in memory.

    Raises:
        DflashError: a bundle of engines, or a value out of range (usage).
    """

    def __init__(
        self,
        bundle: Bundle,
        *,
        threads: int = 1,
        sequences: int = 8,
        block_size: int | None = None,
        edits: Edits | None = None,
    ) -> None:
        check_value("threads", threads, Threads)
        check_value("sequences", sequences, Count)
        self.bundle = bundle
        self.block_size = choose_block(block_size, bundle.manifest.limits.block_size)
        self._sequences = sequences
        self._graphs = ReplayGraphs(bundle, threads, edits or Edits())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Releases graphs and weights; may be called twice."""
        self._graphs.close()

    def measure(self, answers: Sequence[Answer], progress: Progress | None = None) -> Acceptance:
        """What the speculative loop would have accepted of `answers`.

        Contexts are made one answer at a time, as places in a batch become free.

        Raises:
            DflashError: an answer that the bundle could not have given (usage), or ONNX Runtime
                failed.
        """
        return self._walk(answers, lambda index: self._inject(answers[index]), progress)

    def inject(
        self, answers: Sequence[Answer], progress: Progress | None = None
    ) -> list[ContextRows]:
        """The draft's context of each answer, for `ask`; held in memory.

        Raises:
            DflashError: see `measure`.
        """
        self._check(answers)
        progress = progress or SilentProgress()
        progress.stage("reading answers", sum(len(one.known_ids) for one in answers), "tokens")
        contexts = []
        for answer in answers:
            contexts.append(self._inject(answer))
            progress.advance(len(answer.known_ids))
        return contexts

    def ask(
        self,
        answers: Sequence[Answer],
        contexts: Sequence[ContextRows],
        progress: Progress | None = None,
        *,
        mask_token_id: int | None = None,
    ) -> Acceptance:
        """As `measure`, with contexts that `inject` made, of this replay or one of equal sizes.

        Contexts may be longer than an answer. Blocks are filled with `mask_token_id`, None for
        the bundle's.
        """
        return self._walk(answers, contexts.__getitem__, progress, mask_token_id)

    def features(self, token_ids: Sequence[int]) -> FloatArray:
        """Residual streams of the target over a sequence, in prefill chunks.

        float32 [tokens, (taps + 1)·hidden]: those that the draft taps, in the order of its
        `target_layer_ids`, and behind them the last layer's, which the norm and the head read.

        Raises:
            DflashError: see `measure`.
        """
        check_ids(token_ids, self.bundle.manifest, "token_ids")
        chunks: list[FloatArray] = []
        self._graphs.run_target(token_ids, chunks.append)
        return np.concatenate(chunks)

    def _inject(self, answer: Answer) -> ContextRows:
        # The last token is nobody's context: no block begins behind it.
        return self._graphs.run_target(answer.known_ids[:-1])

    def _walk(
        self,
        answers: Sequence[Answer],
        contexts: Callable[[int], ContextRows],
        progress: Progress | None,
        mask_token_id: int | None = None,
    ) -> Acceptance:
        self._check(answers)
        progress = progress or SilentProgress()
        steps = sum(max(len(one.token_ids) - 1, 0) for one in answers)
        progress.stage("replaying answers", steps, "tokens")
        walk = _Walk(self._graphs, self.block_size, mask_token_id, progress)
        walkers = [_Walker(index, answer) for index, answer in enumerate(answers)]
        walk.run(walkers, contexts, min(self._sequences, len(answers)))
        counts = [
            one.recorder.freeze(len(one.answer.prompt_ids), len(one.answer.token_ids))
            for one in walkers
        ]
        return summarise(answers, counts, StepTable.join(walk.rows, self.block_size))

    def _check(self, answers: Sequence[Answer]) -> None:
        if not answers:
            raise DflashError("there is no answer to replay", usage=True)
        for number, answer in enumerate(answers, start=1):
            if not len(answer.prompt_ids):
                what = "its prompt holds no token"
                raise DflashError(what, where=f"answer {number}", usage=True)
            check_ids(answer.known_ids, self.bundle.manifest, f"answer {number}")


@dataclass(slots=True)
class _Walker:
    index: int
    answer: Answer
    ids: Int64Array = field(init=False)
    anchor: int = field(init=False)
    context: ContextRows = field(default_factory=dict)
    recorder: StatisticsRecorder = field(default_factory=lambda: StatisticsRecorder(0.0))

    def __post_init__(self) -> None:
        self.ids = np.array(self.answer.known_ids, np.int64)
        # Without an output there is no anchor, and nothing behind the prompt either.
        self.anchor = min(len(self.answer.prompt_ids), len(self.ids) - 1)

    @property
    def known(self) -> int:
        """Tokens of the answer behind the anchor."""
        return len(self.ids) - 1 - self.anchor


class _Walk:
    """Asks the draft for a block at an anchor, then on from the last token that is kept.

    As decoding is lossless, the target would say the answer's tokens again; so a draft is accepted
    while it equals them (arXiv 2602.06036). `rows` are the steps of a StepTable.
    """

    def __init__(
        self, graphs: ReplayGraphs, block_size: int, mask_token_id: int | None, progress: Progress
    ) -> None:
        self._graphs, self._block_size = graphs, block_size
        self._mask_token_id, self._progress = mask_token_id, progress
        self.rows: list[dict[str, Any]] = []

    def run(
        self, walkers: Sequence[_Walker], contexts: Callable[[int], ContextRows], sequences: int
    ) -> None:
        """Walks over all, so many `sequences` in a pass."""
        # The longest first: the caches' length, which attention pays for, can only fall.
        ordered = sorted(walkers, key=lambda one: len(one.ids), reverse=True)
        waiting = deque(one for one in ordered if one.known)
        seated: list[_Walker] = []
        caches: HostCaches | None = None
        while waiting or seated:
            while waiting and len(seated) < sequences:
                walker = waiting.popleft()
                rows = contexts(walker.index)
                walker.context = {name: one[: len(walker.ids) - 1] for name, one in rows.items()}
                seated.append(walker)
                if caches is not None:
                    caches.fill(len(seated) - 1, walker.context)
            longest = max(len(one.ids) for one in seated) + self._block_size
            if caches is None or caches.length >= 2 * max(longest, 128):
                caches = self._graphs.make_caches(sequences, longest)
                for slot, walker in enumerate(seated):
                    caches.fill(slot, walker.context)
            self._step_all(caches, seated)
            for slot in reversed(range(len(seated))):
                if not seated[slot].known:
                    walker, last = seated[slot], seated.pop()
                    walker.context = {}
                    if last is not walker:
                        seated[slot] = last
                        caches.fill(slot, last.context)

    def _step_all(self, caches: HostCaches, seated: list[_Walker]) -> None:
        first, most, end = 0, self._block_size, self._graphs.drafts_end
        for rows, run in groupby(seated, lambda one: min(most, max(1, end - one.anchor))):
            together = list(run)
            self._step(caches, first, together, rows)
            first += len(together)

    def _step(self, caches: HostCaches, first: int, walkers: list[_Walker], rows: int) -> None:
        drafts = np.zeros((len(walkers), 0), np.int64)
        logits = np.zeros((len(walkers), 0, self._graphs.vocab_size), np.float32)
        if rows > 1:
            anchors = np.array([one.ids[one.anchor] for one in walkers])
            starts = np.array([one.anchor for one in walkers])
            drafts, logits = self._graphs.run_draft(
                caches, first, anchors, starts, rows, self._mask_token_id
            )
        for offset, walker in enumerate(walkers):
            start = walker.anchor
            self._take(walker, rows, drafts[offset], logits[offset])
            # The block's own rows lie where the target's features were.
            caches.restore(first + offset, walker.context, start, start + rows)

    def _take(self, walker: _Walker, rows: int, drafts: Int64Array, logits: FloatArray) -> None:
        start, known, slots = walker.anchor, walker.known, self._block_size - 1
        follows = walker.ids[start + 1 : start + 1 + self._block_size]
        compared = min(len(drafts), len(follows))
        equal = drafts[:compared] == follows[:compared]
        matched = compared if equal.all() else int(equal.argmin())
        # Where all that is known was matched, the loop settled more than it could emit.
        verified = matched + 1
        emitted = min(verified, known)
        trials, accepted = walker.recorder.record_step(rows, verified, emitted)
        self.rows.append(
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
        self._progress.advance(emitted)


def _ranks(logits: FloatArray, tokens: Int64Array) -> list[int]:
    """How many of each row [n,V] are higher than its token's; all others where it is no choice."""
    own = np.take_along_axis(logits, tokens[:, None], axis=1)
    ranks = np.where(np.isneginf(own[:, 0]), logits.shape[1] - 1, (logits > own).sum(axis=1))
    found: list[int] = ranks.tolist()
    return found


def _confidence(logits: FloatArray) -> list[float]:
    highest = logits.max(axis=1, keepdims=True)
    confidence: list[float] = (1 / np.exp(logits - highest).sum(axis=1)).tolist()
    return confidence


def _pad(values: list[Number], width: int, filler: Number) -> list[Number]:
    return values + [filler] * (width - len(values))

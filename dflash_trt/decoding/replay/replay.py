"""Replay: known answers, run through a bundle's own graphs without the speculative loop."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Self

import numpy as np

from dflash_trt.backends.base import FloatArray
from dflash_trt.bundle.bundle import Bundle
from dflash_trt.core.limits import Threads, choose_block
from dflash_trt.core.progress import Progress, SilentProgress
from dflash_trt.core.validation import check_value
from dflash_trt.decoding.replay.edits import Edits
from dflash_trt.decoding.replay.replay_graphs import ContextRows, ReplayGraphs
from dflash_trt.decoding.replay.replayed_acceptance import (
    Acceptance,
    Answer,
    check_answers,
    check_ids,
    summarise,
)
from dflash_trt.decoding.replay.walk import ChainWalk
from dflash_trt.errors import DflashError


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
        if sequences < 1:
            raise DflashError(f"{sequences} is less than 1", where="sequences", usage=True)
        limits = bundle.manifest.limits
        self.bundle = bundle
        self.block_size = choose_block(block_size, limits.block_size)
        self._sequences = sequences
        self._graphs = ReplayGraphs(bundle, threads, edits or Edits())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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
        self._check(answers)
        return self._walk(answers, None, progress or SilentProgress())

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
        self._check(answers)
        return self._walk(answers, contexts, progress or SilentProgress(), mask_token_id)

    def features(self, token_ids: Sequence[int]) -> FloatArray:
        """Residual streams of the target over a sequence, in prefill chunks.

        float32 [tokens, (taps + 1)·hidden]: those that the draft taps, in the order of its
        `target_layer_ids`, and behind them the last layer's, which the norm and the head read.

        Raises:
            DflashError: see `measure`.
        """
        self._check_ids(token_ids, "token_ids")
        chunks: list[FloatArray] = []
        self._graphs.run_target(token_ids, chunks.append)
        return np.concatenate(chunks)

    def _inject(self, answer: Answer) -> ContextRows:
        # The last token is nobody's context: no block begins behind it.
        return self._graphs.run_target(answer.known_ids[:-1])

    def _walk(
        self,
        answers: Sequence[Answer],
        contexts: Sequence[ContextRows] | None,
        progress: Progress,
        mask_token_id: int | None = None,
    ) -> Acceptance:
        progress.stage(
            "replaying answers", sum(max(len(one.token_ids) - 1, 0) for one in answers), "tokens"
        )
        walk = ChainWalk(
            self._graphs,
            answers,
            lambda index: self._inject(answers[index]) if contexts is None else contexts[index],
            sequences=min(self._sequences, len(answers)),
            block_size=self.block_size,
            mask_token_id=mask_token_id,
        )
        table, per_answer = walk.run(progress)
        return summarise(answers, per_answer, table)

    def _check(self, answers: Sequence[Answer]) -> None:
        limits = self.bundle.manifest.limits
        check_answers(answers, self.bundle.manifest.target.vocab_size, limits.max_seq_len)

    def _check_ids(self, ids: Sequence[int], where: str) -> None:
        manifest = self.bundle.manifest
        if not len(ids):
            raise DflashError("it holds no token", where=where, usage=True)
        check_ids(ids, manifest.target.vocab_size, manifest.limits.max_seq_len, where)

"""What lower precision costs: next-token distributions and acceptance of a pair beside its twin's.

Both targets read the same text, and what they expect after each of its tokens is compared (teacher
forcing), in float64 from float32 logits. The twin is the same pair in high precision.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from dflash_trt.backends.base import (
    Executor,
    FloatArray,
    Int64Array,
    Scores,
    TargetCall,
    hold_positions,
)
from dflash_trt.core.arrays import Float64Array
from dflash_trt.decoding.generator import Generator
from dflash_trt.decoding.generator_options import GeneratorOptions
from dflash_trt.decoding.request import Request
from dflash_trt.decoding.scores import sampling_input
from dflash_trt.decoding.statistics import TotalStatistics, total
from dflash_trt.errors import DflashError
from dflash_trt.sampling.choice import find_highest
from dflash_trt.sampling.params import SamplingParams

# Logits of a large vocabulary are megabytes a row, in float64 and several times over.
ROWS_AT_ONCE = 32

Side = Literal["twin", "bundle"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TextFigures:
    """A model beside its twin over `tokens` predicted tokens.

    `agreement` is the share of rows whose likeliest token is the same. KL is the sum of
    p (ln p - ln q) over the vocabulary, in nats per token, with p the twin's and q the model's;
    perplexity is exp(mean of -ln p(next token)).
    """

    tokens: int
    agreement: float
    mean_kl: float
    max_kl: float
    twin_perplexity: float
    perplexity: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptanceFigures:
    """Acceptance of one combination of target and draft."""

    target: Side
    draft: Side
    temperature: float
    statistics: TotalStatistics


@dataclass(slots=True)
class LogitComparison:
    """Adds up rows of logits of a twin and of the model beside it."""

    tokens: int = 0
    agreed: int = 0
    kl_sum: float = 0.0
    max_kl: float = 0.0
    twin_surprise: float = 0.0
    surprise: float = 0.0

    def add(self, twin: FloatArray, logits: FloatArray, next_ids: Int64Array) -> None:
        """Counts rows [R,V] of both, and `next_ids` [R], the tokens that the text goes on with.

        Raises:
            DflashError: a row without a finite maximum.
        """
        rows = np.arange(len(next_ids))
        expected, actual = _log_softmax(twin), _log_softmax(logits)
        p = np.exp(expected)
        with np.errstate(invalid="ignore"):  # -inf - -inf, where p is 0 anyway
            terms = np.where(p > 0, p * (expected - actual), 0.0)
        divergences = np.maximum(terms.sum(axis=1), 0.0)  # rounding may leave -1e-17
        self.tokens += len(next_ids)
        self.agreed += int((twin.argmax(axis=1) == logits.argmax(axis=1)).sum())
        self.kl_sum += float(divergences.sum())
        self.max_kl = max(self.max_kl, float(divergences.max()))
        self.twin_surprise -= float(expected[rows, next_ids].sum())
        self.surprise -= float(actual[rows, next_ids].sum())

    def to_figures(self) -> TextFigures:
        return TextFigures(
            tokens=self.tokens,
            agreement=self.agreed / self.tokens,
            mean_kl=self.kl_sum / self.tokens,
            max_kl=self.max_kl,
            twin_perplexity=_exp(self.twin_surprise / self.tokens),
            perplexity=_exp(self.surprise / self.tokens),
        )


def compare_texts(
    twin: Executor,
    executor: Executor,
    texts: Sequence[Sequence[int]],
    on_tokens: Callable[[int], None] = lambda count: None,
) -> TextFigures:
    """Lets both read `texts` (token ids, cut into pieces that fit both contexts) and compares.

    The first token of a piece is given, not predicted. Both use the baseline graph, in slot 0.

    Raises:
        DflashError: no text holds a token to predict, or logits are not finite.
    """
    comparison = LogitComparison()
    context = min(twin.limits.max_seq_len, executor.limits.max_seq_len)
    rows = min(one.limits.chunk(ROWS_AT_ONCE) for one in (twin, executor))
    for one in (twin, executor):
        hold_positions(one, context)
    for piece in cut_texts(texts, context):
        for start in range(0, len(piece) - 1, rows):
            ids = piece[start : min(start + rows, len(piece) - 1)]
            expected, actual = _read(twin, ids, start), _read(executor, ids, start)
            comparison.add(expected, actual, piece[start + 1 : start + 1 + len(ids)])
            on_tokens(len(ids))
    for one in (twin, executor):
        one.release_slots(0)
    if not comparison.tokens:
        raise DflashError("the text holds no token to predict", fix="it needs two", usage=True)
    return comparison.to_figures()


def cut_texts(texts: Sequence[Sequence[int]], context: int) -> Iterator[Int64Array]:
    """Pieces of at most `context` token ids, in order."""
    for text in texts:
        ids = np.array(text, np.int64)
        for start in range(0, len(ids), context):
            yield ids[start : start + context]


def measure_acceptance(
    executor: Executor,
    requests: Sequence[Request],
    *,
    eos_token_ids: Sequence[int] = (),
    prefill_chunk: int,
    on_tokens: Callable[[int], None] = lambda count: None,
) -> TotalStatistics:
    """Runs `requests` with speculation; `on_tokens` hears of every output token."""
    options = GeneratorOptions(prefill_chunk=prefill_chunk)
    generator = Generator(executor, eos_token_ids=eos_token_ids, options=options)
    results = generator.generate(requests, lambda index, event: on_tokens(len(event.token_ids)))
    return total(result.statistics for result in results)


def find_loss(reference: AcceptanceFigures, figures: AcceptanceFigures) -> float | None:
    """By how many per cent the acceptance length is below `reference`'s; None if unmeasured."""
    best, actual = (one.statistics.acceptance_length for one in (reference, figures))
    return None if best is None or actual is None else 100 * (1 - actual / best)


def _read(executor: Executor, ids: Int64Array, start: int) -> FloatArray:
    """Logits [R,V] after each of `ids` [R], which stand at `start` … in slot 0."""
    rows = np.arange(len(ids))
    greedy, starts = sampling_input(executor.limits, [SamplingParams()]), np.array([start])
    call = TargetCall("target_only", 0, ids[None], starts, rows[None], Scores.LOGITS, greedy)
    output = executor.forward(call)
    assert output.logits is not None
    logits: FloatArray = output.logits[0]
    find_highest(logits, start + 1 + rows)
    return logits


def _log_softmax(logits: FloatArray) -> Float64Array:
    """Log-probabilities [R,V] of rows whose maximum is finite."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=1, keepdims=True)
    log_sum: Float64Array = np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return shifted - log_sum


def _exp(exponent: float) -> float:
    """e^exponent; infinite where float64 ends."""
    return math.exp(exponent) if exponent < 709 else math.inf

"""What lower precision costs: a bundle beside its high-precision twin.

Both targets read the same text, and what they expect after each of its tokens is compared (teacher
forcing), in float64 from float32 logits; then every target runs with every draft.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
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
from dflash_trt.backends.registry import open_executor
from dflash_trt.bundle.bundle import Bundle
from dflash_trt.core.arrays import Float64Array
from dflash_trt.core.limits import advise_shorter
from dflash_trt.core.progress import Progress
from dflash_trt.decoding import Generator, GeneratorOptions, Request, SamplingParams
from dflash_trt.decoding.scores import sampling_input
from dflash_trt.decoding.statistics import TotalStatistics, total
from dflash_trt.errors import DflashError
from dflash_trt.proof.twins import Twins, crossed_bundles
from dflash_trt.sampling.choice import find_highest

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
    """Acceptance of one combination of target and draft.

    `loss` is the per cent by which its acceptance length is below the twin's own at the same
    temperature; None if either is unmeasured.
    """

    target: Side
    draft: Side
    temperature: float
    statistics: TotalStatistics
    loss: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TwinComparison:
    """What was measured, by temperature."""

    text: TextFigures
    acceptances: list[AcceptanceFigures]

    def failures(self, agreement: float | None, tau_loss: float | None) -> list[str]:
        """The bounds that it breaks, in words; None is not looked at.

        `agreement` is a share of tokens, `tau_loss` per cent of the twin's acceptance length.
        """
        found = []
        if agreement is not None and self.text.agreement < agreement:
            found.append(f"agreement {self.text.agreement:.6f} is below {agreement:g}")
        for one in () if tau_loss is None else self.acceptances:
            where = "greedy" if one.temperature == 0 else f"temperature {one.temperature:g}"
            if (one.target, one.draft) != ("bundle", "bundle"):
                continue
            if one.loss is None:
                found.append(f"no draft was verified ({where}), so that no loss is known")
            elif tau_loss is not None and one.loss > tau_loss:
                found.append(
                    f"the acceptance length is {one.loss:.2f} % below the twin's ({where}), more "
                    f"than {tau_loss:g} %"
                )
        return found


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


def compare(
    twins: Twins,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    *,
    max_tokens: int,
    threads: int,
    progress: Progress,
) -> TwinComparison:
    """Lets both bundles read `prompts`, and runs them with every target beside every draft.

    Prompts are token ids; they run greedily and, where `sampling` is not greedy,
    with it too.
    """
    requests = _requests(twins, prompts, max_tokens)
    # Crossed bundles have no tokenizer, which may name an end of its own.
    ends = twins.twin.manifest.target.eos_token_ids
    samplings = [SamplingParams()] if sampling.greedy else [SamplingParams(), sampling]
    tokens = len(samplings) * sum(request.max_tokens or 0 for request in requests)
    with crossed_bundles(twins, progress) as (twin_target, twin_draft):
        progress.stage("comparing texts", sum(len(text) - 1 for text in prompts), "tokens")
        with (
            closing(open_executor(twins.twin, threads=threads)) as twin,
            closing(open_executor(twins.bundle, threads=threads)) as executor,
        ):
            figures = compare_texts(twin, executor, prompts, progress.advance)
        combinations: list[tuple[Side, Side, Bundle]] = [
            ("twin", "twin", twins.twin),
            ("twin", "bundle", twin_target),
            ("bundle", "twin", twin_draft),
            ("bundle", "bundle", twins.bundle),
        ]
        best: dict[float, float | None] = {}
        acceptances: list[AcceptanceFigures] = []
        for target, draft, bundle in combinations:
            progress.stage(f"running the {target}'s target, the {draft}'s draft", tokens, "tokens")
            options = GeneratorOptions(prefill_chunk=bundle.manifest.limits.prefill_chunk)
            with closing(open_executor(bundle, threads=threads)) as executor:
                generator = Generator(executor, eos_token_ids=ends, options=options)
                for one in samplings:
                    results = generator.generate(
                        [replace(request, sampling=one) for request in requests],
                        lambda _, event: progress.advance(len(event.token_ids)),
                    )
                    statistics = total(result.statistics for result in results)
                    length = statistics.acceptance_length
                    most = best.setdefault(one.temperature, length)  # the twin's, which is first
                    acceptances.append(
                        AcceptanceFigures(
                            target=target,
                            draft=draft,
                            temperature=one.temperature,
                            statistics=statistics,
                            loss=100 * (1 - length / most) if length and most else None,
                        )
                    )
    acceptances.sort(key=lambda one: one.temperature)
    return TwinComparison(text=figures, acceptances=acceptances)


def _requests(twins: Twins, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[Request]:
    """The prompts as requests that end at the same place in either bundle."""
    manifests = (twins.bundle.manifest, twins.twin.manifest)
    context, longest = min((one.limits.max_seq_len, one.longest) for one in manifests)
    for number, ids in enumerate(prompts, start=1):
        if len(ids) >= context:
            raise DflashError(
                f"{len(ids)} tokens do not fit the context of {context}",
                where=f"prompt {number}",
                fix=advise_shorter(context, longest),
                usage=True,
            )
    return [
        Request(prompt_ids=tuple(ids), max_tokens=min(max_tokens, context - len(ids)))
        for ids in prompts
    ]


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

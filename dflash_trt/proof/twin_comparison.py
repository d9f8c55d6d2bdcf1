"""A bundle beside its high-precision twin: their texts, and every target with every draft."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

from dflash_trt.backends.registry import open_executor
from dflash_trt.bundle.bundle import Bundle
from dflash_trt.core.progress import Progress
from dflash_trt.decoding import Request, SamplingParams
from dflash_trt.errors import DflashError
from dflash_trt.proof.comparison import (
    AcceptanceFigures,
    Side,
    TextFigures,
    compare_texts,
    find_loss,
    measure_acceptance,
)
from dflash_trt.proof.twins import Twins, crossed_bundles


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What makes a comparison fail; None is not looked at.

    `agreement` is a share of tokens, `tau_loss` per cent of the twin's acceptance length.
    """

    agreement: float | None
    tau_loss: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TwinComparison:
    """What was measured, and the bounds that it breaks, in words."""

    text: TextFigures
    acceptances: list[AcceptanceFigures]
    failures: list[str]

    def find_loss(self, figures: AcceptanceFigures) -> float | None:
        """Per cent by which the acceptance length is below the twin's; None if unmeasured."""
        return find_loss(_reference(self.acceptances, figures), figures)


def compare(
    twins: Twins,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    *,
    max_tokens: int,
    threads: int,
    bounds: Bounds,
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
        acceptances: list[AcceptanceFigures] = []
        for target, draft, bundle in combinations:
            total = len(samplings) * sum(request.max_tokens or 0 for request in requests)
            progress.stage(f"running the {target}'s target, the {draft}'s draft", total, "tokens")
            with closing(open_executor(bundle, threads=threads)) as executor:
                for one in samplings:
                    statistics = measure_acceptance(
                        executor,
                        [replace(request, sampling=one) for request in requests],
                        eos_token_ids=ends,
                        prefill_chunk=bundle.manifest.limits.prefill_chunk,
                        on_tokens=progress.advance,
                    )
                    measured = AcceptanceFigures(
                        target=target,
                        draft=draft,
                        temperature=one.temperature,
                        statistics=statistics,
                    )
                    acceptances.append(measured)
    acceptances.sort(key=lambda one: one.temperature)
    failures = list(_failures(figures, acceptances, bounds))
    return TwinComparison(text=figures, acceptances=acceptances, failures=failures)


def _requests(twins: Twins, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[Request]:
    """The prompts as requests that end at the same place in either bundle."""
    context = min(one.manifest.limits.max_seq_len for one in (twins.bundle, twins.twin))
    for number, ids in enumerate(prompts, start=1):
        if len(ids) >= context:
            raise DflashError(
                f"{len(ids)} tokens do not fit the context of {context}",
                where=f"prompt {number}",
                fix="shorten it, or build with a larger --max-seq-len",
                usage=True,
            )
    return [
        Request(prompt_ids=tuple(ids), max_tokens=min(max_tokens, context - len(ids)))
        for ids in prompts
    ]


def _failures(
    text: TextFigures, acceptances: Sequence[AcceptanceFigures], bounds: Bounds
) -> Iterator[str]:
    if bounds.agreement is not None and text.agreement < bounds.agreement:
        yield f"agreement {text.agreement:.6f} is below {bounds.agreement:g}"
    if bounds.tau_loss is None:
        return
    for one in acceptances:
        if one.target == one.draft == "bundle":
            loss = find_loss(_reference(acceptances, one), one)
            where = "greedy" if one.temperature == 0 else f"temperature {one.temperature:g}"
            if loss is None:
                yield f"no draft was verified ({where}), so that no loss is known"
            elif loss > bounds.tau_loss:
                yield (
                    f"the acceptance length is {loss:.2f} % below the twin's ({where}), more than "
                    f"{bounds.tau_loss:g} %"
                )


def _reference(
    acceptances: Sequence[AcceptanceFigures], figures: AcceptanceFigures
) -> AcceptanceFigures:
    """The twin's target with the twin's draft, at the same temperature."""
    same = (one for one in acceptances if one.temperature == figures.temperature)
    return next(one for one in same if one.target == one.draft == "twin")

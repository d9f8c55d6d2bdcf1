"""What `dflash-trt verify --against` does: a bundle beside its high-precision twin."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from typing import Any

import click

from dflash_trt.backends.registry import open_executor
from dflash_trt.bundle.bundle import Bundle
from dflash_trt.cli.progress import StageBars
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
from dflash_trt.runtime import Request, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What makes a comparison fail; None is not looked at.

    `agreement` is a share of tokens, `tau_loss` per cent of the twin's acceptance length.
    """

    agreement: float | None
    tau_loss: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What was measured, and the bounds that it breaks, in words."""

    text: TextFigures
    acceptances: list[AcceptanceFigures]
    failures: list[str]


def compare(
    twins: Twins,
    prompts: Sequence[Sequence[int]],
    texts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    *,
    max_tokens: int,
    threads: int,
    bounds: Bounds,
) -> Comparison:
    """Lets both bundles read `texts`, and runs `prompts` with every target beside every draft.

    Texts and prompts are token ids. Prompts run greedily and, where `sampling` is not greedy,
    with it too.
    """
    requests = _requests(twins, prompts, max_tokens)
    samplings = [SamplingParams()] if sampling.greedy else [SamplingParams(), sampling]
    with StageBars() as bars, crossed_bundles(twins, bars) as (twin_target, twin_draft):
        bars.stage("comparing texts", sum(len(text) - 1 for text in texts), "tokens")
        with (
            closing(open_executor(twins.twin, threads=threads)) as twin,
            closing(open_executor(twins.bundle, threads=threads)) as executor,
        ):
            figures = compare_texts(twin, executor, texts, bars.advance)
        combinations: list[tuple[Side, Side, Bundle]] = [
            ("twin", "twin", twins.twin),
            ("twin", "bundle", twin_target),
            ("bundle", "twin", twin_draft),
            ("bundle", "bundle", twins.bundle),
        ]
        acceptances: list[AcceptanceFigures] = []
        for target, draft, bundle in combinations:
            total = len(samplings) * sum(request.max_tokens or 0 for request in requests)
            bars.stage(f"running the {target}'s target, the {draft}'s draft", total, "tokens")
            with closing(open_executor(bundle, threads=threads)) as executor:
                for one in samplings:
                    statistics = measure_acceptance(
                        executor,
                        [replace(request, sampling=one) for request in requests],
                        eos_token_ids=bundle.manifest.target.eos_token_ids,
                        prefill_chunk=bundle.manifest.limits.prefill_chunk,
                        on_tokens=bars.advance,
                    )
                    acceptances.append(
                        AcceptanceFigures(
                            target=target,
                            draft=draft,
                            temperature=one.temperature,
                            statistics=statistics,
                        )
                    )
    acceptances.sort(key=lambda one: one.temperature)
    failures = list(_failures(figures, acceptances, bounds))
    return Comparison(text=figures, acceptances=acceptances, failures=failures)


def print_comparison(comparison: Comparison) -> None:
    """The comparison as text."""
    text = comparison.text
    change = text.perplexity / text.twin_perplexity - 1
    click.echo(f"{text.tokens:,} predicted tokens, bundle beside its twin:")
    click.echo(f"  same likeliest token  {text.agreement:.2%}")
    click.echo(
        f"  KL(twin ‖ bundle)     {text.mean_kl:.3g} nats a token, at most {text.max_kl:.3g}"
    )
    click.echo(
        f"  perplexity            {text.perplexity:.4f}, twin {text.twin_perplexity:.4f} "
        f"({change:+.2%})"
    )
    for temperature in sorted({one.temperature for one in comparison.acceptances}):
        name = "greedy" if temperature == 0 else f"temperature {temperature:g}"
        rows = [one for one in comparison.acceptances if one.temperature == temperature]
        click.echo(f"acceptance length over {rows[0].statistics.requests} prompts, {name}:")
        click.echo("  target  draft   length    loss   steps  tokens")
        for row in rows:
            click.echo(f"  {row.target:<6}  {row.draft:<6}  {_acceptance(rows[0], row)}")
    for failure in comparison.failures:
        click.echo(f"FAILED: {failure}")


def print_comparison_json(comparison: Comparison) -> None:
    """The comparison as JSON."""
    acceptances: list[dict[str, Any]] = []
    for one in comparison.acceptances:
        acceptances.append(
            {
                "target": one.target,
                "draft": one.draft,
                "temperature": one.temperature,
                "loss_percent": find_loss(_reference(comparison.acceptances, one), one),
                "tokens": one.tokens,
                "statistics": one.statistics.to_json(),
            }
        )
    text = {
        # JSON has no infinity: its name instead.
        key: value if math.isfinite(value) else str(value)
        for key, value in asdict(comparison.text).items()
    }
    answer = {"text": text, "acceptance": acceptances, "failures": comparison.failures}
    click.echo(json.dumps(answer, indent=2))


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


def _reference(
    acceptances: Sequence[AcceptanceFigures], figures: AcceptanceFigures
) -> AcceptanceFigures:
    """The twin's target with the twin's draft, at the same temperature."""
    same = (one for one in acceptances if one.temperature == figures.temperature)
    return next(one for one in same if one.target == one.draft == "twin")


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


def _acceptance(reference: AcceptanceFigures, figures: AcceptanceFigures) -> str:
    length, loss = figures.statistics.acceptance_length, find_loss(reference, figures)
    measured = "     -       -" if length is None else f"{length:6.3f}"
    if length is not None:
        measured += "       -" if loss is None else f"  {loss:5.1f}%"
    return f"{measured}  {figures.statistics.steps:6,}  {figures.tokens:6,}"

"""How `dflash-trt verify --against` shows a bundle beside its high-precision twin."""

from __future__ import annotations

from dataclasses import asdict

import click

from dflash_trt.cli.options import print_json
from dflash_trt.proof.comparison import AcceptanceFigures
from dflash_trt.proof.twin_comparison import TwinComparison


def print_comparison(comparison: TwinComparison) -> None:
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
            click.echo(f"  {row.target:<6}  {row.draft:<6}  {_acceptance(comparison, row)}")
    for failure in comparison.failures:
        click.echo(f"FAILED: {failure}")


def print_comparison_json(comparison: TwinComparison) -> None:
    """The comparison as JSON."""
    acceptances = [
        {
            "target": one.target,
            "draft": one.draft,
            "temperature": one.temperature,
            "loss_percent": comparison.find_loss(one),
            "tokens": one.statistics.step_tokens,
            "statistics": one.statistics.to_json(),
        }
        for one in comparison.acceptances
    ]
    text = asdict(comparison.text)
    print_json({"text": text, "acceptance": acceptances, "failures": comparison.failures})


def _acceptance(comparison: TwinComparison, figures: AcceptanceFigures) -> str:
    length, loss = figures.statistics.acceptance_length, comparison.find_loss(figures)
    measured = "     -       -" if length is None else f"{length:6.3f}"
    if length is not None:
        measured += "       -" if loss is None else f"  {loss:5.1f}%"
    return f"{measured}  {figures.statistics.steps:6,}  {figures.statistics.step_tokens:6,}"

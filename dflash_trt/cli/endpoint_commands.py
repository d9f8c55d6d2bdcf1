"""`verify --url` and `diagnose --url`: a server that others run, asked over OpenAI's API."""

from __future__ import annotations

from pathlib import Path

import click

from dflash_trt.bundle.bundle import load_tokenizer, open_bundle
from dflash_trt.cli.bars import StageBars
from dflash_trt.cli.options import TaskOptions, print_json
from dflash_trt.errors import EXIT_FAILED, DflashError
from dflash_trt.proof.endpoint.answer_comparison import AnswerComparison
from dflash_trt.proof.endpoint.asked_server import AskedServer, Asking, Sets
from dflash_trt.proof.endpoint.endpoint_diagnosis import AS_SERVED, diagnose_endpoint
from dflash_trt.proof.endpoint.endpoint_proof import (
    ALONE,
    EndpointProof,
    survey,
)
from dflash_trt.serving.client.draft_counts import ESTIMATE, DraftCounts
from dflash_trt.text.task_sets import ALL, encode_tasks
from dflash_trt.text.tokenizer import BundleTokenizer

SHOWN = 8
"""Partings of a comparison that are printed; JSON has all."""
URL_HELP = (
    "http://HOST:PORT/v1 of an OpenAI-compatible server (its key in OPENAI_API_KEY); with a "
    "BUNDLE, it is asked that one's token ids."
)


def needs_bundle(bundle: Path | None) -> Path:
    """The bundle of a command that was given no --url instead."""
    if bundle is None:
        raise DflashError("name a BUNDLE, or the --url of a server", usage=True)
    return bundle


def verify_urls(urls: list[str], bundle: Path | None, prompts: TaskOptions, as_json: bool) -> int:
    """Runs `verify --url`; the exit code is 1 where answers change."""
    tokenizer, sets = _read_sets(bundle, prompts)
    asking = Asking(max_tokens=prompts.max_tokens, temperature=prompts.sampling.temperature)
    options = ("--url", "--against-url")
    servers = [AskedServer(*one, tokenizer) for one in zip(urls, options, strict=False)]
    with StageBars() as bars:
        proof = EndpointProof([survey(server, sets, asking, bars) for server in servers])
    if as_json:
        print_json(proof.to_json())
    else:
        _print_proof(
            proof, [f"{name}, prompt {n + 1}" for name in sets for n in range(len(sets[name]))]
        )
    return EXIT_FAILED if proof.verdict == "changed" else 0


def diagnose_url(
    url: str, bundle: Path | None, prompts: TaskOptions, thinking: str | None, as_json: bool
) -> None:
    """Runs `diagnose --url`."""
    if bundle is not None and thinking is not None:
        what = "is the server's template's, which token ids of a BUNDLE do not pass"
        raise DflashError(what, where="--thinking", usage=True)
    tokenizer, sets = _read_sets(bundle, prompts)
    switch = None if thinking is None else thinking == "on"
    temperature = prompts.sampling.temperature
    asking = Asking(max_tokens=prompts.max_tokens, temperature=temperature, thinking=switch)
    server = AskedServer(url, "--url", tokenizer)
    with StageBars() as bars:
        found = diagnose_endpoint(server, sets, asking, bars)
    if as_json:
        print_json(found.to_json())
        return
    click.echo(f"{found.server}: {describe_drafts(found.drafts[AS_SERVED])}")
    if found.published:
        shown = ", ".join(f"{name} {tau:g}" for name, tau in found.published.items())
        click.echo(f"published of {found.pair}: {shown}")
    for name, gain in found.gains.items():
        told = found.drafts[name]
        length = "-" if told is None or told.length is None else f"{told.length:.2f}"
        click.echo(f"  {name:<24} {length:>5}  {gain}")
    if found.is_estimated:
        click.echo("gains are ESTIMATED from chunks: the answers tell of no drafts")
    click.echo(f"verdict: {found.advice}")


def describe_drafts(told: DraftCounts | None) -> str:
    """τ, and who says so."""
    if told is None or told.length is None:
        return "no drafts are told of, and the stream shows none"
    if told.gauge is not None:
        return f"τ {told.length:.2f} ({told.source}, of whatever the server did last)"
    is_estimate = told.source == ESTIMATE
    line = (
        f"{'ESTIMATED ' * is_estimate}τ {told.length:.2f} ({told.source}, {told.steps:,.0f} steps"
    )
    line += f", {told.accepted:,.0f} accepted"
    line += "" if told.drafted is None else f" of {told.drafted:,.0f} drafts"
    line += "; a chunk may hold several steps" * is_estimate
    shares = " ".join(f"{one / told.steps:.0%}" for one in told.by_position)
    return f"{line}; by position {shares})" if shares else f"{line})"


def _read_sets(bundle: Path | None, prompts: TaskOptions) -> tuple[BundleTokenizer | None, Sets]:
    """The prompts by set: users' messages, or the token ids that the bundle makes of them."""
    if bundle is None:
        return None, {one.name: [each.text for each in one.prompts] for one in prompts.read()}
    opened = open_bundle(bundle)
    tokenizer, sets = load_tokenizer(opened), dict[str, list[tuple[int, ...]]]()
    for task in encode_tasks(tokenizer, prompts.read(opened.prompts)):
        sets.setdefault(task.set_name, []).append(task.ids)
    return tokenizer, sets


def _print_proof(proof: EndpointProof, labels: list[str]) -> None:
    for letter, one in zip("AB", proof.surveys, strict=False):
        click.echo(f"{letter}: {one.server}")
        for own in one.own:
            _print_comparison(f"{letter} {own.title}", own, one.noise, labels)
        for name, told in one.drafts.items():
            if name == ALL or len(one.drafts) > 2:
                click.echo(f"{letter} acceptance, {name}: {describe_drafts(told)}")
    noise = proof.surveys[0].noise
    for found in proof.between:
        title = f"B {found.title}".removesuffix(f" {ALONE}") + " against A"
        _print_comparison(title, found, noise, labels)
    limit = f" (ties: up to {proof.tie_limit:.2g} nats)" if proof.tie_limit else ""
    click.echo(f"verdict: {proof.verdict}{limit}")


def _print_comparison(title: str, found: AnswerComparison, noise: float, labels: list[str]) -> None:
    changed, parted = found.changed(noise), len(found.partings)
    line = f"{title}: {found.answers - parted} of {found.answers} answers identical"
    line += f", {parted - changed} part at ties" if parted > changed else ""
    line += f", {changed} CHANGED ({changed / found.answers:.1%})" if changed else ""
    line += f"; {found.tokens:,} equal before any parting"
    if found.drift is not None:
        line += ", log-probabilities {1:.2g} apart, at most {0:.2g}".format(*found.drift)
    click.echo(line)
    for one in found.partings[:SHOWN]:
        gap = "no log-probability is told"
        if one.gap is not None:
            how = "apart" if one.is_drawn else "less likely"
            gap = f"{'at least ' * one.is_least}{one.gap:.3g} nats {how}"
        kind = "tie" if one.is_tie(noise) else "changed"
        place = f"output {one.unit.removesuffix(' id')} {one.position}"
        click.echo(
            f"  {labels[one.prompt]}, {place}: {one.expected} became {one.actual}, {gap}: {kind}"
        )
    if parted > SHOWN:
        click.echo(f"  … and {parted - SHOWN} more")

"""What `diagnose` shows and writes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import click

from dflash_trt.bundle.bundle import Bundle
from dflash_trt.core.publish import file_error, replace_file
from dflash_trt.proof.diagnosis.diagnose import Diagnosis
from dflash_trt.proof.diagnosis.evidence import Evidence
from dflash_trt.proof.diagnosis.question import Question
from dflash_trt.proof.diagnosis.verdict import show_gain

SHOWN = 12
"""Changes that are printed, the best first; JSON has all."""


def print_diagnosis(bundle: Bundle, diagnosis: Diagnosis) -> None:
    """Prints figures, then the verdict."""
    evidence = diagnosis.evidence
    base = evidence.base
    click.echo(
        f"{bundle.folder}: {base.answers} answers, {base.tokens:,} tokens, {base.steps:,} steps"
    )
    low, high = evidence.expected
    if base.acceptance_length is not None:
        click.echo(
            f"acceptance length {base.acceptance_length:.2f} ({low:.2f} to {high:.2f}); "
            f"break-even {evidence.break_even:.2f}; with the best of each slot's 16 likeliest "
            f"{evidence.oracle_length:.2f}"
        )
    _print_slots(evidence)
    _print_groups(evidence)
    click.echo("changed, one thing at a time:")
    for trial in evidence.tried[:SHOWN]:
        known = trial.acceptance_length is not None
        length = f"{trial.acceptance_length:5.2f}" if known else f"{'-':>5}"
        click.echo(f"  {trial.change:<52} {length}  {show_gain(trial.gain)}")
    if len(evidence.tried) > SHOWN:
        click.echo(f"  … and {len(evidence.tried) - SHOWN} that lose more")
    click.echo("")
    click.echo(f"verdict: {diagnosis.verdict.text}")
    for finding in diagnosis.verdict.findings:
        click.echo(f"- {finding.cause.value}: {finding.evidence}")
        click.echo(f"  what to do: {finding.cause.fix}")


def _print_slots(evidence: Evidence) -> None:
    base = evidence.base
    rows = {
        "accepted": base.conditional_acceptance,
        "in the 16 likeliest": base.recall_at_16,
        "confidence": base.confidence,
    }
    width = len(base.recall_at_16)
    click.echo(f"  {'slot':<20}" + "".join(f"{slot:>6}" for slot in range(1, width + 1)))
    for name, values in rows.items():
        click.echo(f"  {name:<20}" + "".join(map(_share, values)))
    if evidence.slots is not None:
        agreement = evidence.slots.agreement
        click.echo(
            f"  agreement with the token before, at and behind a slot's place: "
            f"{agreement[-1]:.1%}, {agreement[0]:.1%}, {agreement[1]:.1%}"
        )


def _print_groups(evidence: Evidence) -> None:
    groups = [*evidence.groups, *([evidence.reference] if evidence.reference else [])]
    for group in groups:
        length = group.acceptance.acceptance_length or 0.0
        recall = group.acceptance.recall_at_16[0]
        click.echo(
            f"  {group.name:<36} {length:5.2f} tokens a step, slot 1 in the 16 likeliest "
            f"{'-' if recall is None else f'{recall:.0%}'}, against the others "
            f"{show_gain(group.gain)}"
        )


def write_diagnosis(
    folder: Path,
    bundle: Bundle,
    diagnosis: Diagnosis,
    questions: Sequence[Question],
    set_names: Sequence[str],
) -> None:
    """Writes diagnosis.html, diagnosis.json, and answers/SET.jsonl for `--known-answers`.

    Raises:
        DflashError: the folder cannot be written to, or the perf extra is missing.
    """
    from dflash_perf.report.diagnosis import render_diagnosis

    page = render_diagnosis(str(bundle.folder), diagnosis)
    answers: dict[str, list[str]] = {}
    for question, answer, name in zip(questions, diagnosis.answers, set_names, strict=True):
        record = {"prompt": question.text, "answer": list(answer.token_ids)}
        record |= {"category": question.tags[0]} if question.tags else {}
        answers.setdefault(name, []).append(json.dumps(record) + "\n")
    try:
        (folder / "answers").mkdir(parents=True, exist_ok=True)
        for name, lines in answers.items():
            replace_file(folder / "answers" / f"{name}.jsonl", "".join(lines).encode())
        figures = json.dumps(diagnosis.to_json(), indent=1) + "\n"
        replace_file(folder / "diagnosis.json", figures.encode())
        replace_file(folder / "diagnosis.html", page.encode())
    except OSError as error:
        raise file_error(error, folder) from error


def _share(value: float | None) -> str:
    return f"{'-':>6}" if value is None else f"{value:>6.0%}"

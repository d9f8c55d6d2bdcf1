"""`dflash-trt diagnose`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import click

from dflash_trt.bundle.bundle import Bundle, bound_memory, load_tokenizer, open_bundle
from dflash_trt.cli.bars import StageBars
from dflash_trt.cli.options import (
    FILE,
    FOLDER,
    TaskOptions,
    bundle_argument,
    json_option,
    max_tokens_option,
    print_json,
    task_options,
    temperature_option,
    threads_option,
)
from dflash_trt.core.publish import file_error, replace_file
from dflash_trt.decoding import SamplingParams
from dflash_trt.decoding.replay import Answer
from dflash_trt.errors import DflashError
from dflash_trt.hardware.cores import ThreadChoice, choose_threads
from dflash_trt.proof.diagnosis.diagnose import (
    Diagnosis,
    Reference,
    Serving,
    answer_questions,
    diagnose,
)
from dflash_trt.proof.diagnosis.question import THINKING, Form, Question, encode
from dflash_trt.proof.diagnosis.verdict import show_gain
from dflash_trt.text.prompts import PromptRecord, read_records
from dflash_trt.text.tokenizer import BundleTokenizer

PROMPTS = 32
"""Prompts of each set, unless more are asked for: enough to tell 3 % from chance."""
SHOWN = 12
"""Changes that are printed, the best first; JSON has all."""


@click.command("diagnose")
@bundle_argument
@task_options
@max_tokens_option
@temperature_option
@click.option(
    "--thinking",
    type=click.Choice(["on", "off"]),
    help="Serve with this enable_thinking.  [default: the template's]",
)
@click.option(
    "--known-answers",
    is_flag=True,
    help='Replay the "answer" of every prompt in the files; decode nothing.',
)
@click.option(
    "--training-rows",
    type=FILE,
    help='Rows that the draft was trained on (.jsonl: "prompt" and "answer"), to compare with.',
)
@click.option(
    "--against",
    type=FOLDER,
    help="The same pair in high precision, where BUNDLE is quantised.",
)
@threads_option
@json_option
@click.option(
    "-o",
    "--output",
    type=FOLDER,
    help="Folder for a page with charts, the figures, and the answers for --known-answers.",
)
def command(
    bundle: Path,
    prompts: TaskOptions,
    max_tokens: int,
    sampling: SamplingParams,
    thinking: str | None,
    known_answers: bool,
    training_rows: Path | None,
    against: Path | None,
    threads: ThreadChoice,
    as_json: bool,
    output: Path | None,
) -> None:
    """Say why few drafts of BUNDLE are accepted.

    The target answers the prompts as they would be served. Its answers are replayed: what the
    draft would have got accepted follows from one pass. Then one thing at a time is changed (tapped
    layers, mask token, rope base, windows, tables, chat template, features of --against), and what
    gains beyond chance is blamed. Of each set the first 32 prompts are used, or --limit-prompts;
    without prompts, those that came with the pair.
    """
    opened = open_bundle(bundle)
    bound_memory(opened)
    twin = None if against is None else open_bundle(against)
    tokenizer = load_tokenizer(opened)
    limit = prompts.limit_prompts or PROMPTS
    sets = dataclasses.replace(prompts, limit_prompts=limit).read(opened.prompts)
    form = _form(tokenizer, thinking)
    chosen = choose_threads(threads, opened.manifest.target.parameters)
    service = Serving(form=form, sampling=sampling, max_tokens=max_tokens, threads=chosen)
    questions = [
        Question(
            record.text,
            one.name if len(sets) > 1 else "",
            () if record.category is None else (record.category,),
        )
        for one in sets
        for record in one.prompts
    ]
    with StageBars() as bars:
        if known_answers:
            records = [record for one in sets for record in one.prompts]
            answers = _known(tokenizer, records, questions, form, "--known-answers")
            asked: list[Question] = []
        else:
            answers = answer_questions(opened, questions, service, bars)
            asked = questions
        diagnosis = diagnose(
            opened,
            answers,
            service,
            bars,
            questions=asked,
            reference=_reference(
                opened, tokenizer, questions, service, training_rows, bars, decodes=bool(asked)
            ),
            twin=twin,
        )
    if output is not None:
        names = [one.name for one in sets for _ in one.prompts]
        _write_diagnosis(output, opened, diagnosis, questions, names)
    if as_json:
        print_json(diagnosis.to_json())
    else:
        _print_diagnosis(opened, diagnosis)


def _form(tokenizer: BundleTokenizer, thinking: str | None) -> Form:
    if thinking is None:
        return Form(raw=tokenizer.chat_template is None)
    renderer = tokenizer.open_renderer()
    if renderer is None or not renderer.knows(THINKING):
        what = "the prompts have no chat template" if renderer is None else "it has no such switch"
        raise DflashError(what, where="--thinking", fix="leave it out", usage=True)
    return Form(thinking=thinking == "on")


def _reference(
    bundle: Bundle,
    tokenizer: BundleTokenizer,
    questions: Sequence[Question],
    service: Serving,
    training_rows: Path | None,
    bars: StageBars,
    *,
    decodes: bool,
) -> Reference | None:
    """Rows that the draft should be good at: of its training, or, if it `decodes`, answers to the
    prompts that came with the pair."""
    if training_rows is not None:
        records = read_records(training_rows)[:PROMPTS]
        asked = [Question(record.text) for record in records]
        answers = _known(tokenizer, records, asked, service.form, str(training_rows))
        return Reference("training rows", answers, is_training=True)
    if bundle.prompts is None or not decodes:
        return None
    own = [Question(record.text) for record in read_records(bundle.prompts)[:PROMPTS]]
    if {one.text for one in own} & {one.text for one in questions}:
        return None
    answers = answer_questions(bundle, own, service, bars)
    return Reference("the prompts that came with the pair", answers, is_training=False)


def _known(
    tokenizer: BundleTokenizer,
    records: Sequence[PromptRecord],
    questions: Sequence[Question],
    form: Form,
    where: str,
) -> list[Answer]:
    """The answers that records hold, as text or as token ids."""
    prompts = encode(tokenizer, [record.text for record in records], form)
    answers = []
    for number, (record, ids, question) in enumerate(
        zip(records, prompts, questions, strict=True), start=1
    ):
        if not record.answer:
            raise DflashError(f'prompt {number} has no "answer"', where=where, usage=True)
        tokens = record.answer
        if isinstance(tokens, str):
            tokens = tuple(tokenizer.encode(tokens, special=False))
        answers.append(Answer(ids, tokens, question.set_name, question.tags))
    return answers


def _print_diagnosis(bundle: Bundle, diagnosis: Diagnosis) -> None:
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
    rows = {
        "accepted": base.conditional_acceptance,
        "in the 16 likeliest": base.recall_at_16,
        "confidence": base.confidence,
    }
    slots = range(1, len(base.recall_at_16) + 1)
    click.echo(f"  {'slot':<20}" + "".join(f"{slot:>6}" for slot in slots))
    for name, values in rows.items():
        shares = (f"{'-':>6}" if one is None else f"{one:>6.0%}" for one in values)
        click.echo(f"  {name:<20}" + "".join(shares))
    if evidence.slots is not None:
        agreement = evidence.slots.agreement
        click.echo(
            f"  agreement with the token before, at and behind a slot's place: "
            f"{agreement[-1]:.1%}, {agreement[0]:.1%}, {agreement[1]:.1%}"
        )
    for group in [*evidence.groups, *([evidence.reference] if evidence.reference else [])]:
        reached = group.acceptance.acceptance_length or 0.0
        recall = group.acceptance.recall_at_16[0]
        click.echo(
            f"  {group.name:<36} {reached:5.2f} tokens a step, slot 1 in the 16 likeliest "
            f"{'-' if recall is None else f'{recall:.0%}'}, against the others "
            f"{show_gain(group.gain)}"
        )
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


def _write_diagnosis(
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

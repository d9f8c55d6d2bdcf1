"""`dflash-trt diagnose`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import click

from dflash_trt.bundle.bundle import Bundle, bound_memory, load_tokenizer, open_bundle
from dflash_trt.cli.bars import StageBars
from dflash_trt.cli.endpoint_commands import URL_HELP, diagnose_url, needs_bundle
from dflash_trt.cli.options import (
    FILE,
    FOLDER,
    TaskOptions,
    json_option,
    optional_bundle_argument,
    print_json,
    refuse_given,
    task_options,
    threads_option,
)
from dflash_trt.core.publish import file_error, replace_file
from dflash_trt.decoding.replay import Answer
from dflash_trt.errors import DflashError
from dflash_trt.hardware.cores import ThreadChoice, choose_threads
from dflash_trt.proof.diagnosis.diagnose import (
    THINKING,
    Diagnosis,
    Form,
    Serving,
    answer_questions,
    check_diagnosed,
    diagnose,
    encode,
)
from dflash_trt.text.prompts import PromptRecord, read_prompts, read_records
from dflash_trt.text.tokenizer import BundleTokenizer

PROMPTS = 32
"""Prompts of each set, unless more are asked for: enough to tell 3 % from chance."""
LOCAL_OPTIONS = {"known_answers", "training_rows", "against", "threads", "output"}
SHOWN = 12
"""Changes that are printed, the best first; JSON has all."""


@click.command("diagnose")
@optional_bundle_argument
@task_options
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
@click.option("--url", help=f"Instead: {URL_HELP}")
@threads_option
@json_option
@click.option(
    "-o",
    "--output",
    type=FOLDER,
    help="Folder for a page with charts, the figures, and the answers for --known-answers.",
)
@click.pass_context
def command(
    context: click.Context,
    bundle: Path | None,
    prompts: TaskOptions,
    thinking: str | None,
    known_answers: bool,
    training_rows: Path | None,
    against: Path | None,
    url: str | None,
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

    With --url, ask a server all prompts, then without its chat template, with and without
    thinking, at another temperature and cut short, and say which of them moves its acceptance.
    """
    if url is not None:
        refuse_given(context, LOCAL_OPTIONS, "does not go with --url")
        sized = dataclasses.replace(prompts, limit_prompts=prompts.limit_prompts or PROMPTS)
        diagnose_url(url, bundle, sized, thinking, as_json)
        return
    opened = open_bundle(needs_bundle(bundle))
    check_diagnosed(opened)  # before the target answers, which takes long
    bound_memory(opened)
    twin = None if against is None else open_bundle(against)
    tokenizer = load_tokenizer(opened)
    limit = prompts.limit_prompts or PROMPTS
    sets = dataclasses.replace(prompts, limit_prompts=limit).read(opened.prompts)
    form = _form(tokenizer, thinking)
    chosen = choose_threads(threads, opened.manifest.target.parameters)
    service = Serving(
        form=form, sampling=prompts.sampling, max_tokens=prompts.max_tokens, threads=chosen
    )
    records = [record for one in sets for record in one.prompts]
    names = [one.name for one in sets for _ in one.prompts]
    texts = [record.text for record in records]
    with StageBars() as bars:
        if known_answers:
            answers = _known(tokenizer, records, form, "--known-answers")
        else:
            answers = answer_questions(opened, texts, service, bars)
        answers = [
            dataclasses.replace(
                answer,
                set_name=name if len(sets) > 1 else "",
                tags=() if record.category is None else (record.category,),
            )
            for answer, name, record in zip(answers, names, records, strict=True)
        ]
        # Rows that the draft should be good at: of its training, or answers to its own prompts.
        reference = None
        if training_rows is not None:
            rows = read_records(training_rows)[:PROMPTS]
            reference = "training rows", _known(tokenizer, rows, form, str(training_rows))
        elif opened.prompts is not None and not known_answers:
            own = read_prompts(opened.prompts)[:PROMPTS]
            if not {*own} & {*texts}:
                rows_of_pair = answer_questions(opened, own, service, bars)
                reference = "the prompts that came with the pair", rows_of_pair
        asked = () if known_answers else texts
        diagnosis = diagnose(
            opened, answers, service, bars, questions=asked, reference=reference, twin=twin
        )
    if output is not None:
        _write_diagnosis(output, opened, diagnosis, records, names)
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


def _known(
    tokenizer: BundleTokenizer, records: Sequence[PromptRecord], form: Form, where: str
) -> list[Answer]:
    """The answers that records hold, as text or as token ids."""
    prompts = encode(tokenizer, [record.text for record in records], form)
    answers = []
    for number, (record, ids) in enumerate(zip(records, prompts, strict=True), start=1):
        if not record.answer:
            raise DflashError(f'prompt {number} has no "answer"', where=where, usage=True)
        tokens = record.answer
        if isinstance(tokens, str):
            tokens = tuple(tokenizer.encode(tokens, special=False))
        answers.append(Answer(ids, tokens))
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
            f"{group.gain}"
        )
    click.echo("changed, one thing at a time:")
    for trial in evidence.tried[:SHOWN]:
        known = trial.acceptance_length is not None
        length = f"{trial.acceptance_length:5.2f}" if known else f"{'-':>5}"
        click.echo(f"  {trial.change:<52} {length}  {trial.gain}")
    if len(evidence.tried) > SHOWN:
        click.echo(f"  … and {len(evidence.tried) - SHOWN} that lose more")
    click.echo("")
    click.echo(f"verdict: {diagnosis.verdict.text}")
    for finding in diagnosis.verdict.findings:
        click.echo(f"- {finding.cause.title}: {finding.evidence}")
        click.echo(f"  what to do: {finding.cause.fix}")


def _write_diagnosis(
    folder: Path,
    bundle: Bundle,
    diagnosis: Diagnosis,
    records: Sequence[PromptRecord],
    set_names: Sequence[str],
) -> None:
    """Writes diagnosis.html, diagnosis.json, and answers/SET.jsonl for `--known-answers`.

    Raises:
        DflashError: the folder cannot be written to, or the perf extra is missing.
    """
    from dflash_perf.report.diagnosis import render_diagnosis

    page = render_diagnosis(str(bundle.folder), diagnosis)
    answers: dict[str, list[str]] = {}
    for record, answer, name in zip(records, diagnosis.answers, set_names, strict=True):
        line = {"prompt": record.text, "answer": list(answer.token_ids)}
        line |= {} if record.category is None else {"category": record.category}
        answers.setdefault(name, []).append(json.dumps(line) + "\n")
    try:
        (folder / "answers").mkdir(parents=True, exist_ok=True)
        for name, lines in answers.items():
            replace_file(folder / "answers" / f"{name}.jsonl", "".join(lines).encode())
        figures = json.dumps(diagnosis.to_json(), indent=1) + "\n"
        replace_file(folder / "diagnosis.json", figures.encode())
        replace_file(folder / "diagnosis.html", page.encode())
    except OSError as error:
        raise file_error(error, folder) from error

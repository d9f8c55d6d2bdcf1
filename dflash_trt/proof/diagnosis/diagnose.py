"""Why is acceptance low? Answers, their replay, one change at a time, and a verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from dflash_trt.bundle.bundle import Bundle
from dflash_trt.core.progress import Progress
from dflash_trt.decoding import RequestResult, SamplingParams
from dflash_trt.decoding.replay import Answer, Replay
from dflash_trt.decoding.schedule import NO_SPECULATION
from dflash_trt.decoding.statistics import total
from dflash_trt.decoding.tuning.break_even import own_schedule, schedule_break_even
from dflash_trt.decoding.tuning.bundle_schedule import NONE
from dflash_trt.errors import DflashError
from dflash_trt.pair import LoadedPair
from dflash_trt.proof.diagnosis.cause import Cause
from dflash_trt.proof.diagnosis.evidence import (
    BREAK_EVEN,
    Evidence,
    Group,
    compare_groups,
    compare_slots,
)
from dflash_trt.proof.diagnosis.gain import count, group_gain, paired_gain
from dflash_trt.proof.diagnosis.question import Form, Question, encode, other_forms
from dflash_trt.proof.diagnosis.trial import Trial, TrialBench
from dflash_trt.proof.diagnosis.verdict import Verdict, judge

FORM_PROMPTS = 16
"""Prompts that are answered in each other form: every one is decoded anew."""


@dataclass(frozen=True, slots=True)
class Serving:
    """How the pair is served: the form of prompts, sampling and the longest answer."""

    form: Form = Form()
    sampling: SamplingParams = SamplingParams()
    max_tokens: int = 128
    threads: int = 1


@dataclass(frozen=True, slots=True)
class Reference:
    """Rows that the draft should be good at; `is_training`: it was trained on them."""

    name: str
    answers: Sequence[Answer]
    is_training: bool


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """A verdict, and what it rests on."""

    verdict: Verdict
    evidence: Evidence
    answers: Sequence[Answer]

    def to_json(self) -> dict[str, Any]:
        return {"verdict": self.verdict.to_json(), **self.evidence.to_json()}


def answer_questions(
    bundle: Bundle, questions: Sequence[Question], service: Serving, progress: Progress
) -> list[Answer]:
    """The target's answers to `questions`, decoded as they would be served.

    Raises:
        DflashError: a prompt that the pair cannot run.
    """
    with _open(bundle, service) as pair:
        results = _ask(pair, questions, service, progress)
    return [
        Answer(ids, result.token_ids, question.set_name, question.tags)
        for question, (ids, result) in zip(questions, results, strict=True)
    ]


def diagnose(
    bundle: Bundle,
    answers: Sequence[Answer],
    service: Serving,
    progress: Progress,
    *,
    questions: Sequence[Question] = (),
    reference: Reference | None = None,
    twin: Bundle | None = None,
) -> Diagnosis:
    """The diagnosis of a bundle on known answers.

    Args:
        questions: the prompts of `answers` as texts, in their order; without them other forms of
            prompts are not tried.
        reference: rows to compare with.
        twin: the pair in high precision, where the bundle is quantised.

    Raises:
        DflashError: answers or bundles that cannot be used.
    """
    if questions and len(questions) != len(answers):
        raise DflashError(f"{len(questions)} questions have {len(answers)} answers", usage=True)
    if not (traits := bundle.manifest.draft.traits).is_diagnosed:
        raise DflashError(
            f"has {traits.title}, of whose chain nothing can be changed yet",
            where=bundle.folder,
            fix="verify tells its acceptance",
            usage=True,
        )
    bench = TrialBench(bundle, answers, threads=service.threads, progress=progress)
    base = bench.base
    trials = bench.try_all()
    if twin is not None:
        trials += bench.try_twin(twin)
    evidence = Evidence(
        base=base,
        slots=compare_slots(base.table),
        trials=trials,
        others_context=bench.try_others_context() if len(answers) > 1 else None,
        groups=compare_groups(base),
        break_even=_break_even(bundle),
    )
    del bench  # its contexts; what follows loads the pair again
    if questions:
        evidence = _compare_forms(bundle, evidence, questions, service, progress)
    if reference is not None:
        evidence = _compare_reference(bundle, evidence, reference, service, progress)
    return Diagnosis(judge(evidence), evidence, answers)


def _break_even(bundle: Bundle) -> float:
    """By the bundle's tuning, at the block of one sequence; else BREAK_EVEN."""
    schedule = own_schedule(bundle)
    block = NO_SPECULATION if schedule is None else schedule.block_size(1)
    if block == NO_SPECULATION:  # one sequence does not draft: judge by what it would cost
        block = bundle.manifest.limits.block_size
    known = schedule_break_even(schedule, block)
    return BREAK_EVEN if known is None else known


def _compare_forms(
    bundle: Bundle,
    evidence: Evidence,
    questions: Sequence[Question],
    service: Serving,
    progress: Progress,
) -> Evidence:
    """The same prompts in other forms."""
    few = questions[:FORM_PROMPTS]
    served = evidence.base.per_answer[: len(few)]
    trials: list[Trial] = []
    with _open(bundle, service) as pair:
        for form in other_forms(pair.tokenizer, service.form):
            results = _ask(pair, few, replace(service, form=form), progress)
            counts = [result.statistics for _, result in results]
            both = [one for one in zip(served, counts, strict=True) if all(x.steps for x in one)]
            gain = paired_gain(count([a for a, _ in both]), count([b for _, b in both]))
            cause = Cause.TEMPLATE if form.thinking is None else Cause.THINKING
            length = total(counts).acceptance_length
            trials.append(Trial(cause, form.text, length, gain, len(both)))
    return replace(evidence, forms=trials)


def _compare_reference(
    bundle: Bundle,
    evidence: Evidence,
    reference: Reference,
    service: Serving,
    progress: Progress,
) -> Evidence:
    with Replay(bundle, threads=service.threads) as replay:
        theirs = replay.measure(reference.answers, progress)
    gain = group_gain(count(evidence.base.per_answer), count(theirs.per_answer))
    group = Group(reference.name, theirs, gain)
    return replace(evidence, reference=group, is_training=reference.is_training)


def _open(bundle: Bundle, service: Serving) -> LoadedPair:
    return LoadedPair(bundle, threads=service.threads, block_schedule=NONE)


def _ask(
    pair: LoadedPair, questions: Sequence[Question], service: Serving, progress: Progress
) -> list[tuple[list[int], RequestResult]]:
    """The prompts' token ids in the served form, and what was answered."""
    prompts = encode(pair.tokenizer, [question.text for question in questions], service.form)
    requests = [
        pair.request(ids, service.sampling, max_tokens=service.max_tokens) for ids in prompts
    ]
    progress.stage("asking the target", len(requests) * service.max_tokens, "tokens")
    results = pair.run(requests, lambda _, event: progress.advance(len(event.token_ids)))
    return list(zip(prompts, results, strict=True))

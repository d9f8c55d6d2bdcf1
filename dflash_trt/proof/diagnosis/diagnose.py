"""Why is acceptance low? Answers, their replay, one change at a time, and a verdict."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from dflash_trt.bundle.bundle import Bundle, load_tokenizer
from dflash_trt.core.progress import Progress
from dflash_trt.decoding import RequestResult, SamplingParams
from dflash_trt.decoding.replay import Acceptance, Answer, Replay
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
from dflash_trt.proof.diagnosis.gain import count, measure_gain
from dflash_trt.proof.diagnosis.trial import Trial, TrialBench
from dflash_trt.proof.diagnosis.verdict import Verdict, judge
from dflash_trt.text.tokenizer import BundleTokenizer

FORM_PROMPTS = 16
"""Prompts that are answered in each other form: every one is decoded anew."""

THINKING = "enable_thinking"


@dataclass(frozen=True, slots=True)
class Form:
    """How prompts become tokens: `raw` text, or a user's message in the chat template.

    `thinking` is the template's enable_thinking; None leaves it to the template.
    """

    raw: bool = False
    thinking: bool | None = None

    @property
    def text(self) -> str:
        if self.raw:
            return "without the chat template"
        if self.thinking is None:
            return "with the chat template"
        return f"with thinking {'on' if self.thinking else 'off'}"


def encode(tokenizer: BundleTokenizer, texts: Sequence[str], form: Form) -> list[list[int]]:
    """Token ids of `texts` in a form; without a template all are raw."""
    if form.raw or tokenizer.chat_template is None:
        return [tokenizer.encode(text) for text in texts]
    variables = {} if form.thinking is None else {THINKING: form.thinking}
    return tokenizer.encode_chats(texts, variables=variables)


def _other_forms(tokenizer: BundleTokenizer, served: Form) -> list[Form]:
    """The forms that are tried beside the one that is served, each apart from it in one thing."""
    renderer = tokenizer.open_renderer()
    if renderer is None:
        return []
    with closing(renderer):
        can_think = renderer.knows(THINKING)
    if served.raw:
        return [Form()]
    thinking = [not served.thinking] if served.thinking is not None else [True, False]
    return [Form(raw=True), *(Form(thinking=one) for one in thinking if can_think)]


@dataclass(frozen=True, slots=True)
class Serving:
    """How the pair is served: the form of prompts, sampling and the longest answer."""

    form: Form = Form()
    sampling: SamplingParams = SamplingParams()
    max_tokens: int = 128
    threads: int = 1


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """A verdict, and what it rests on."""

    verdict: Verdict
    evidence: Evidence
    answers: Sequence[Answer]

    def to_json(self) -> dict[str, Any]:
        return {"verdict": self.verdict.to_json(), **self.evidence.to_json()}


def check_diagnosed(bundle: Bundle) -> None:
    """Refuses a bundle of whose draft nothing can be changed; DflashError (usage)."""
    if not (traits := bundle.manifest.draft.traits).is_diagnosed:
        raise DflashError(
            f"has {traits.title}, of whose chain nothing can be changed yet",
            where=bundle.folder,
            fix="verify tells its acceptance",
            usage=True,
        )


def answer_questions(
    bundle: Bundle, questions: Sequence[str], service: Serving, progress: Progress
) -> list[Answer]:
    """The target's answers to prompts, decoded as they would be served.

    Raises:
        DflashError: a prompt that the pair cannot run.
    """
    (results,) = _ask(bundle, questions, [service.form], service, progress)
    return [Answer(ids, result.token_ids) for ids, result in results]


def diagnose(
    bundle: Bundle,
    answers: Sequence[Answer],
    service: Serving,
    progress: Progress,
    *,
    questions: Sequence[str] = (),
    reference: tuple[str, Sequence[Answer]] | None = None,
    twin: Bundle | None = None,
) -> Diagnosis:
    """The diagnosis of a bundle on known answers.

    Args:
        questions: the prompts of `answers`, in their order; without them other forms of
            prompts are not tried.
        reference: rows that the draft should be good at, and what they are called.
        twin: the pair in high precision, where the bundle is quantised.

    Raises:
        DflashError: answers or bundles that cannot be used.
    """
    check_diagnosed(bundle)
    bench = TrialBench(bundle, answers, threads=service.threads, progress=progress)
    base = bench.base
    trials = bench.try_all()
    if twin is not None:
        trials += bench.try_twin(twin)
    others_context = bench.try_others_context() if len(answers) > 1 else None
    del bench  # its contexts; what follows loads the pair again
    evidence = Evidence(
        base=base,
        slots=compare_slots(base.table),
        trials=trials,
        others_context=others_context,
        forms=_try_forms(bundle, base, questions[:FORM_PROMPTS], service, progress),
        groups=compare_groups(base),
        reference=reference and _compare(bundle, base, *reference, service, progress),
        break_even=_break_even(bundle),
    )
    return Diagnosis(judge(evidence), evidence, answers)


def _break_even(bundle: Bundle) -> float:
    """By the bundle's tuning, at the block of one sequence; else BREAK_EVEN."""
    schedule = own_schedule(bundle)
    block = NO_SPECULATION if schedule is None else schedule.block_size(1)
    if block == NO_SPECULATION:  # one sequence does not draft: judge by what it would cost
        block = bundle.manifest.limits.block_size
    known = schedule_break_even(schedule, block)
    return BREAK_EVEN if known is None else known


def _try_forms(
    bundle: Bundle, base: Acceptance, questions: Sequence[str], service: Serving, progress: Progress
) -> list[Trial]:
    """The same prompts in other forms."""
    if not questions:
        return []
    forms = _other_forms(load_tokenizer(bundle), service.form)
    trials: list[Trial] = []
    for form, results in zip(forms, _ask(bundle, questions, forms, service, progress), strict=True):
        changed = [result.statistics for _, result in results]
        pairs = zip(base.per_answer, changed, strict=False)
        both = [pair for pair in pairs if all(one.steps for one in pair)]
        gain = measure_gain(count([a for a, _ in both]), count([b for _, b in both]), paired=True)
        cause = Cause.TEMPLATE if form.thinking is None else Cause.THINKING
        length = total(changed).acceptance_length
        trials.append(Trial(cause, form.text, length, gain, len(both)))
    return trials


def _compare(
    bundle: Bundle,
    base: Acceptance,
    name: str,
    rows: Sequence[Answer],
    service: Serving,
    progress: Progress,
) -> Group:
    """Other rows, replayed as well."""
    with Replay(bundle, threads=service.threads) as replay:
        theirs = replay.measure(rows, progress)
    gain = measure_gain(count(base.per_answer), count(theirs.per_answer), paired=False)
    return Group(name, theirs, gain)


def _ask(
    bundle: Bundle,
    questions: Sequence[str],
    forms: Sequence[Form],
    service: Serving,
    progress: Progress,
) -> list[list[tuple[list[int], RequestResult]]]:
    """By form: the prompts' token ids, and what was answered."""
    found = []
    with LoadedPair(bundle, threads=service.threads, block_schedule=NONE) as pair:
        for form in forms:
            prompts = encode(pair.tokenizer, questions, form)
            requests = [
                pair.request(ids, service.sampling, max_tokens=service.max_tokens)
                for ids in prompts
            ]
            progress.stage("asking the target", len(requests) * service.max_tokens, "tokens")
            results = pair.run(requests, lambda _, event: progress.advance(len(event.token_ids)))
            found.append(list(zip(prompts, results, strict=True)))
    return found

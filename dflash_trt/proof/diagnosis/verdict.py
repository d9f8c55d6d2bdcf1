"""The verdict: which cause the evidence names, if any, in plain words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from dflash_trt.proof.diagnosis.cause import Cause
from dflash_trt.proof.diagnosis.evidence import Evidence, Group
from dflash_trt.proof.diagnosis.gain import FEWEST, LEAST_TOKENS, MATTERS, Gain, count
from dflash_trt.proof.diagnosis.trial import Trial

LARGE = 0.4
"""What answers to other prompts, or to prompts in another form, must be apart to count: they differ
by nature, the paper's sets by a third. A lesser cause is told if it gains that share of the first
one's, and a better draft path if it would gain so much."""

FALLS = 0.08
"""How far acceptance falls from the first slots to the last ones, where recall stays high."""

HIGH_RECALL = 0.9


class VerdictKind(Enum):
    """What a verdict says; the value is its name in JSON."""

    WRONG = "something is wrong"
    PATH = "a better draft path exists"
    DATA = "other data than in training"
    HEALTHY = "nothing is wrong"
    NOT_FOUND = "not found"
    TOO_FEW = "too few answers"


@dataclass(frozen=True, slots=True)
class CauseFinding:
    """A cause, and what shows it."""

    cause: Cause
    evidence: str

    def to_json(self) -> dict[str, Any]:
        return {"cause": self.cause.value, "evidence": self.evidence, "fix": self.cause.fix}


@dataclass(frozen=True, slots=True)
class Verdict:
    """One sentence or two, and the findings behind them, the weightiest first."""

    kind: VerdictKind
    text: str
    findings: tuple[CauseFinding, ...] = ()

    @property
    def cause(self) -> Cause | None:
        """The weightiest one."""
        return self.findings[0].cause if self.findings else None

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": self.kind.value,
            "text": self.text,
            "findings": [finding.to_json() for finding in self.findings],
        }


def judge(evidence: Evidence) -> Verdict:
    """What to make of the evidence: noise, or less than 3 %, is never a cause."""
    length = evidence.base.acceptance_length
    answers = count(evidence.base.per_answer).shape[1]
    if answers < FEWEST or length is None:
        what = f"{answers} answers with drafts are too few to tell causes from chance"
        return Verdict(VerdictKind.TOO_FEW, f"{what}: give at least {FEWEST}, better 16 prompts.")
    wrong = tuple(_wrongs(evidence))
    if wrong:
        means = wrong[0].cause.means
        return Verdict(VerdictKind.WRONG, f"Acceptance is low because {means}.", wrong)
    data = tuple(_data(evidence))
    if data:
        means = data[0].cause.means
        return Verdict(VerdictKind.DATA, f"The pair works; {means}.", data)
    low, high = evidence.expected
    expect = f"expect about {length:.2f} tokens a step ({low:.2f} to {high:.2f}) on such prompts"
    path = _path(evidence)
    if path is not None:
        text = f"Nothing is built wrongly; {path.cause.means}. Until then {expect}."
        return Verdict(VerdictKind.PATH, text, (path,))
    if length >= evidence.break_even:
        return Verdict(
            VerdictKind.HEALTHY, f"Nothing is wrong: {expect}.{_open_question(evidence)}"
        )
    text = (
        f"Not found: {length:.2f} tokens a step are below break-even "
        f"({evidence.break_even:.2f}), and nothing that was changed moves them by "
        f"{MATTERS:.0%}. The draft may be weak, or these prompts unlike its training; "
    )
    if evidence.reference is None or not evidence.is_training:
        text += "--training-rows FILE tells the two apart."
    else:
        text += "it is no better on its own rows, so train it for longer."
    return Verdict(VerdictKind.NOT_FOUND, text + _open_question(evidence))


def _open_question(evidence: Evidence) -> str:
    """What more answers might show."""
    unsure = [
        trial
        for trial in evidence.trials
        if trial.gain.value >= MATTERS and trial.gain.tokens >= LEAST_TOKENS
    ]
    if not unsure:
        return ""
    best = max(unsure, key=lambda trial: trial.gain.value)
    return f" More prompts would tell whether this is chance: {describe(best)}."


def _wrongs(evidence: Evidence) -> list[CauseFinding]:
    """What is wrong with the pair or how it is served, the greatest gain first."""
    found: list[tuple[float, CauseFinding]] = []
    slots = evidence.slots
    if slots is not None and slots.gain.is_gain:
        where = "behind" if slots.best_neighbour > 0 else "before"
        text = (
            f"slots agree with the token {where} their own place "
            f"{slots.agreement[slots.best_neighbour]:.0%} of the time, with their own "
            f"{slots.agreement[0]:.0%}"
        )
        found.append((slots.gain.value, CauseFinding(Cause.SLOTS, text)))
    best: dict[Cause, Trial] = {}
    for trial in evidence.tried:
        least = LARGE if trial in evidence.forms else 0.0
        if trial.gain.is_gain and trial.gain.value >= least:
            best.setdefault(trial.cause, trial)
    thinking, template = best.get(Cause.THINKING), best.get(Cause.TEMPLATE)
    if thinking and template and template.gain.value < thinking.gain.value + MATTERS:
        del best[Cause.TEMPLATE]  # raw text has no thinking either: the nearer change will do
    found += [
        (trial.gain.value, CauseFinding(trial.cause, describe(trial))) for trial in best.values()
    ]
    if not found and (stranger := _stranger(evidence)) is not None:
        found = [(0.0, stranger)]
    found.sort(key=lambda pair: pair[0], reverse=True)
    # What is wrong leaves little to the rest: a change that repairs a part of it is no cause.
    return [finding for gain, finding in found if gain >= LARGE * found[0][0]]


def _stranger(evidence: Evidence) -> CauseFinding | None:
    """Whether the draft has no use for what the target tells it."""
    trial, recall = evidence.others_context, evidence.base.recall_at_16
    accepted = evidence.base.conditional_acceptance
    if trial is None or not trial.gain.is_known or trial.gain.value < -0.1:
        return None
    if not accepted or (accepted[0] or 0.0) > 0.3:
        return None
    text = (
        f"another answer's context does not make it worse ({trial.gain.value:+.0%}), and only "
        f"{recall[0] or 0.0:.0%} of the answers' tokens are among its first slot's 16 likeliest"
    )
    return CauseFinding(Cause.DRAFT_WEIGHTS, text)


def _data(evidence: Evidence) -> Iterator[CauseFinding]:
    """Other rows at which the draft is much better, and sets at which it is much worse."""
    reference, base = evidence.reference, evidence.base.acceptance_length or 0
    if reference is not None and reference.gain.is_gain and _is_apart(reference.gain):
        text = f"{reference.name}: {_tau(reference)} tokens a step, these prompts {base:.2f}"
        yield CauseFinding(Cause.DATA, text)
    for group in sorted(evidence.groups, key=lambda one: one.gain.value):
        if group.gain.is_loss and _is_apart(group.gain):
            rest = (group.acceptance.acceptance_length or 0) / (1 + group.gain.value)
            text = f"{group.name}: {_tau(group)} tokens a step, the other answers {rest:.2f}"
            yield CauseFinding(Cause.DATA, text)


def _is_apart(gain: Gain) -> bool:
    """Whether one of two acceptance lengths is less than the other by LARGE."""
    return gain.value <= -LARGE or gain.value >= 1 / (1 - LARGE) - 1


def _tau(group: Group) -> str:
    return f"{group.acceptance.acceptance_length or 0:.2f}"


def _path(evidence: Evidence) -> CauseFinding | None:
    """Acceptance that falls from slot to slot while the right tokens are known."""
    rates = [one for one in evidence.base.conditional_acceptance if one is not None]
    recalls = [one for one in evidence.base.recall_at_16 if one is not None]
    length = evidence.base.acceptance_length or 1.0
    if len(rates) < 4 or rates[0] < 0.5:
        return None
    part = max(1, len(rates) // 3)
    falls = sum(rates[:part]) / part - sum(rates[-part:]) / part
    oracle = evidence.oracle_length
    if falls < FALLS or min(recalls[: 2 * part]) < HIGH_RECALL:
        return None
    if oracle / length < 1 + LARGE:
        return None
    text = (
        f"acceptance falls from {rates[0]:.0%} in slot 1 to {rates[-1]:.0%} in slot {len(rates)}, "
        f"while the answer's token stays among the 16 likeliest ({recalls[0]:.0%} to "
        f"{recalls[-1]:.0%}): choosing right among those would give {oracle:.2f} tokens a step"
    )
    return CauseFinding(Cause.DRAFT_PATH, text)


def describe(trial: Trial) -> str:
    """A trial in one line."""
    length = "none" if trial.acceptance_length is None else f"{trial.acceptance_length:.2f}"
    return f"{trial.change}: {length} tokens a step, {show_gain(trial.gain)}"


def show_gain(gain: Gain) -> str:
    """A gain with its interval."""
    if not gain.is_known:
        return "too few answers to compare"
    return f"{gain.value:+.1%} ({gain.low:+.1%} to {gain.high:+.1%})"

"""The verdict: which cause the evidence names, if any, in plain words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from dflash_trt.proof.diagnosis.cause import Cause
from dflash_trt.proof.diagnosis.evidence import Evidence, Group
from dflash_trt.proof.diagnosis.gain import FEWEST, MATTERS, Gain, count
from dflash_trt.proof.diagnosis.trial import Trial

LARGE = 0.4
"""What answers to other prompts, or to prompts in another form, must be apart to count: they differ
by nature, the paper's sets by a third. A lesser cause is told if it gains that share of the first
one's."""


class VerdictKind(Enum):
    """What a verdict says; the value is its name in JSON."""

    WRONG = "something is wrong"
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
        return {"cause": self.cause.title, "evidence": self.evidence, "fix": self.cause.fix}


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
        findings = [finding.to_json() for finding in self.findings]
        return {"kind": self.kind.value, "text": self.text, "findings": findings}


def judge(evidence: Evidence) -> Verdict:
    """What to make of the evidence: noise, or less than MATTERS, is never a cause."""
    length = evidence.base.acceptance_length
    answers = count(evidence.base.per_answer).shape[1]
    if answers < FEWEST or length is None:
        what = f"{answers} answers with drafts are too few to tell causes from chance"
        return Verdict(VerdictKind.TOO_FEW, f"{what}: give at least {FEWEST}, better 16 prompts.")
    if wrong := tuple(_wrongs(evidence)):
        means = wrong[0].cause.means
        return Verdict(VerdictKind.WRONG, f"Acceptance is low because {means}.", wrong)
    if data := tuple(_data(evidence)):
        return Verdict(VerdictKind.DATA, f"The pair works; {Cause.DATA.means}.", data)
    if length >= evidence.break_even:
        low, high = evidence.expected
        text = f"expect about {length:.2f} tokens a step ({low:.2f} to {high:.2f}) on such prompts"
        return Verdict(VerdictKind.HEALTHY, f"Nothing is wrong: {text}.")
    text = (
        f"Not found: {length:.2f} tokens a step are below break-even "
        f"({evidence.break_even:.2f}), and nothing that was changed gains {MATTERS}. "
        "The draft may be weak, or these prompts unlike its training; "
    )
    if evidence.reference is None:
        text += "--training-rows FILE tells the two apart."
    else:
        text += f"it is no better on {evidence.reference.name}, so train it for longer."
    return Verdict(VerdictKind.NOT_FOUND, text)


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
    if thinking and template and template.gain.low < thinking.gain.value:
        del best[Cause.TEMPLATE]  # raw text has no thinking either: the nearer change will do
    found += [(one.gain.value, CauseFinding(one.cause, str(one))) for one in best.values()]
    context = evidence.others_context
    if not found and context is not None and context.gain.is_known and not context.gain.is_loss:
        recall = evidence.base.recall_at_16[0] or 0.0
        text = (
            f"another answer's context does not make it worse ({context.gain.value:+.0%}), and "
            f"only {recall:.0%} of the answers' tokens are among its first slot's 16 likeliest"
        )
        found = [(0.0, CauseFinding(Cause.DRAFT_WEIGHTS, text))]
    found.sort(key=lambda pair: pair[0], reverse=True)
    # What is wrong leaves little to the rest: a change that repairs a part of it is no cause.
    return [finding for gain, finding in found if gain >= LARGE * found[0][0]]


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

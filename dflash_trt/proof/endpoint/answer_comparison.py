"""Answers to the same prompts, compared one by one: equal, parted at a tie, or changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from typing import Any

from dflash_trt.proof.endpoint.told_answer import UNITS, ToldAnswer, ToldToken, Unit

END = "the end"


@dataclass(frozen=True, slots=True)
class Parting:
    """Where two answers to prompt number `prompt` first differ.

    Args:
        position: counts tokens of the output from 0, or characters, as `unit` says.
        gap: how much likelier the expected token was, in nats; None where nobody says.
        is_least: the actual one was not among the likeliest: the gap is at least that.
        is_drawn: tokens were drawn, so no gap makes a tie of them.
    """

    prompt: int
    position: int
    unit: Unit
    expected: str
    actual: str
    gap: float | None = None
    is_least: bool = False
    is_drawn: bool = False

    def is_tie(self, noise: float) -> bool:
        """Whether log-probabilities that each move by `noise` could change places."""
        if self.gap is None or self.is_least or self.is_drawn:
            return False
        return self.gap <= 2 * noise


@dataclass(frozen=True, slots=True)
class AnswerComparison:
    """Answers of one way of asking against another's; `tokens` are those before any parting.

    `drift` is by how much log-probabilities of equal tokens differ, at most and on the average,
    in nats; None where nobody tells them.
    """

    title: str
    answers: int
    tokens: int
    partings: tuple[Parting, ...]
    drift: tuple[float, float] | None

    def changed(self, noise: float) -> int:
        """How many part beyond a tie."""
        return sum(not one.is_tie(noise) for one in self.partings)

    def to_json(self, noise: float) -> dict[str, Any]:
        each = [{**asdict(one), "is_tie": one.is_tie(noise)} for one in self.partings]
        return {**asdict(self), "partings": each, "changed": self.changed(noise)}


def compare_answers(
    title: str,
    expected: Sequence[ToldAnswer],
    actual: Sequence[ToldAnswer],
    is_drawn: bool = False,
) -> AnswerComparison:
    """Compares answers in order, by ids where both sides have them, else by tokens, else text.

    A text without tokens is read in those of the expected answer, which tells how likely they were.
    """
    partings: list[Parting] = []
    drifts: list[float] = []
    tokens = 0
    for prompt, (want, got) in enumerate(zip(expected, actual, strict=True)):
        for unit in UNITS:
            left, right = want.parts(unit), got.parts(unit)
            if unit == "token" and left is not None and right is None:
                left, right = want.spell(want.tokens), got.spell(want.tokens)
            if left is not None and right is not None:
                break
        assert left is not None and right is not None  # every answer has characters
        both = [*zip_longest(left, right, fillvalue=(None, None))]
        agreed = next((at for at, ((a, _), (b, _)) in enumerate(both) if a != b), len(both))
        tokens += agreed
        values = ((a.logprob, b.logprob) for (_, a), (_, b) in both[:agreed] if a and b)
        drifts += [abs(a - b) for a, b in values if a is not None and b is not None]
        if agreed < len(both):
            (_, ours), (_, theirs) = both[agreed]
            names = [END if one is None else str(one) for one in (ours, theirs)]
            found = (names[0], names[1], *_gap(ours, theirs), is_drawn)
            partings.append(Parting(prompt, agreed, unit, *found))
    drift = (max(drifts), sum(drifts) / len(drifts)) if drifts else None
    return AnswerComparison(title, len(expected), tokens, tuple(partings), drift)


def _gap(want: ToldToken | None, got: ToldToken | None) -> tuple[float | None, bool]:
    """By how much `want` was likelier than `got`, by its own word if it tells; or at least that."""
    for own, other in ((want, got), (got, want)):
        if own and other and own.logprob is not None and own.likeliest:
            rival = own.likeliest.get(other.name)
            least = min(own.likeliest.values()) if rival is None else rival
            return abs(own.logprob - least), rival is None
    return None, False

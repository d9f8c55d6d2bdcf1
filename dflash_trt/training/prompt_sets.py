"""Which sets of prompts a draft learns from, and the share of the rows that each is to have."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from dflash_trt.errors import DflashError
from dflash_trt.text.task_sets import name_sources

OWN = "self"
"""As a source: prompts that the target writes itself."""

_SHARE = re.compile(r"(.+):(0?\.\d+)")
_OWN = re.compile(rf"(?:(?P<name>[^=/]+)=)?{OWN}(?::(?P<count>\d+))?")
LEAST_OWN, MOST_OWN = 16, 1_000_000
OWN_PER_HOUR = 400
"""Prompts to write where no number is given: more than an hour of two cores can answer."""


@dataclass(frozen=True, slots=True)
class TrainingSet:
    """A set of prompts.

    Args:
        source: a file or an address on the hub; None for one that the target writes.
        count: prompts to write; 0 for a set that is read.
        share: of the rows to train on; None takes what others leave, by size.
    """

    name: str
    source: str | None
    count: int = 0
    share: float | None = None


def parse_sets(given: Sequence[str], hours: float) -> tuple[TrainingSet, ...]:
    """The sets of texts `[NAME=]SOURCE[:SHARE]`, where SOURCE may be `self[:COUNT]`.

    Raises:
        DflashError: a name that stands twice, a count, or shares that leave nothing (usage).
    """
    texts, shares = [], []
    for text in given:
        match = _SHARE.fullmatch(text)
        texts.append(match[1] if match else text)
        shares.append(float(match[2]) if match else None)
    owns = [_OWN.fullmatch(text) for text in texts]
    named = [
        f"{own['name'] or OWN}={OWN}" if own else text
        for own, text in zip(owns, texts, strict=True)
    ]
    default = min(max(4 * LEAST_OWN, round(OWN_PER_HOUR * hours)), MOST_OWN)
    sets = []
    for (name, source), own, share in zip(name_sources(named).items(), owns, shares, strict=True):
        if own is None:
            sets.append(TrainingSet(name, source, share=share))
            continue
        count = default if own["count"] is None else int(own["count"])
        if not LEAST_OWN <= count <= MOST_OWN:
            what = f"{count:,} prompts are not between {LEAST_OWN} and {MOST_OWN:,}"
            raise DflashError(what, where="--prompts self", usage=True)
        sets.append(TrainingSet(name, None, count, share))
    if sum(map(bool, owns)) > 1:
        what = "the target writes one set"
        raise DflashError(what, where="--prompts self", fix="give one larger COUNT", usage=True)
    stated = round(sum(share or 0 for share in shares), 9)
    if stated > 1 or 0 in shares or (None in shares and stated == 1):
        what = "shares of sets must be above 0 and leave something for the others"
        raise DflashError(what, where="--prompts", fix="they sum to 1 at most", usage=True)
    return tuple(sets)

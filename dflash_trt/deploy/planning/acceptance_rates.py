"""How much of a draft the target keeps, as a function of how much is drafted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_trt.core.files import exists
from dflash_trt.core.strict_json import read_json_object
from dflash_trt.errors import DflashError, one_line

DIAGNOSIS, RUN = "diagnosis.json", "summary.json"
"""What `diagnose` and each run of a `sweep` write."""


@dataclass(frozen=True, slots=True)
class AcceptanceCurve:
    """Share of drafts accepted at each position, given that all before it in the block were.

    Item j of `conditional` is position j + 1's; `source` says whose figures these are.
    """

    conditional: tuple[float, ...]
    source: str

    @staticmethod
    def of_tau(tau: float, drafts: int, source: str) -> AcceptanceCurve:
        """The curve that has `tau` with `drafts` positions and the same share at each.

        Measured curves are not quite flat: for a draft of block 16 with τ 6.33 on MATH-500 this
        says 4.93 at block 8, where 5.09 is published (arXiv 2602.06036).

        Raises:
            DflashError: τ below 1 or above what the drafts can give.
        """
        if not 1 <= tau <= drafts + 1:
            what = f"τ {tau:g} is not between 1 and {drafts + 1} (drafts + bonus)"
            raise DflashError(what, where="--acceptance", usage=True)
        low, high = 0.0, 1.0
        for _ in range(60):
            middle = (low + high) / 2
            if sum(middle**j for j in range(drafts + 1)) < tau:
                low = middle
            else:
                high = middle
        return AcceptanceCurve((low,) * drafts, source)

    def scaled(self, factor: float) -> AcceptanceCurve:
        """A flat curve with `factor` times this one's τ, as far as the drafts allow."""
        drafts = len(self.conditional)
        tau = min(max(self.tau(drafts) * factor, 1.0), drafts + 1.0)
        return AcceptanceCurve.of_tau(tau, drafts, f"{factor:g} × τ of {self.source}")

    def drafts(self, longest: int) -> range:
        """How many tokens a step may draft: up to `longest`, as far as the curve goes."""
        return range(1, min(longest, len(self.conditional)) + 1)

    def tau(self, drafts: int) -> float:
        """Tokens per verify step, bonus included, where `drafts` are drafted (0: 1)."""
        total = reached = 1.0
        for share in self.conditional[:drafts]:
            reached *= share
            total += reached
        return total


def read_acceptance(given: str, drafts: int, workloads: Sequence[str] = ()) -> AcceptanceCurve:
    """`--acceptance`: τ at the trained block as a number, a JSON file, or a folder with one.

    The file has shares by position: `conditional` or `conditional_acceptance`, at its top, under
    `acceptance` or under `total`. So write `generate --json`, a run of `sweep` (summary.json) and
    `diagnose`; their folders will do, of a sweep's the first run that drafted. An error names the
    `workloads` that would do as well.

    Raises:
        DflashError: none of these, or shares outside 0 … 1 (usage).
    """
    try:
        tau = float(given)
    except ValueError:
        path = Path(given)
        if exists(path):
            return _read_file(path, drafts)
        raise DflashError(
            f"{one_line(given, 80)!r} is neither a number nor a file",
            where="--acceptance",
            fix=f"or choose a published workload: {', '.join(workloads)}" if workloads else None,
            usage=True,
        ) from None
    return AcceptanceCurve.of_tau(tau, drafts, f"given: τ {tau:g} at block {drafts + 1}")


def _read_file(path: Path, drafts: int) -> AcceptanceCurve:
    if path.is_dir():
        return _read_folder(path, drafts)
    shares = _find_shares(read_json_object(path, named=True))
    if not shares:
        what = "has no list `conditional` or `conditional_acceptance`"
        raise DflashError(what, where=path, usage=True)
    known = shares[: shares.index(None)] if None in shares else shares  # what blocks got to
    if not known or not all(
        isinstance(share, int | float) and not isinstance(share, bool) and 0 <= share <= 1
        for share in known
    ):
        raise DflashError("conditional must hold shares from 0 to 1", where=path, usage=True)
    return AcceptanceCurve(tuple(map(float, known[:drafts])), f"measured: {path.name}")


def _read_folder(folder: Path, drafts: int) -> AcceptanceCurve:
    """What `diagnose -o` or `sweep -o` wrote there."""
    for name in (DIAGNOSIS, RUN):
        for path in sorted(folder.rglob(name)):
            if _find_shares(read_json_object(path, named=True)):
                return _read_file(path, drafts)
    what = f"holds no {DIAGNOSIS}, and no {RUN} of a run that drafted"
    raise DflashError(what, where=folder, usage=True)


def _find_shares(raw: dict[str, Any]) -> list[Any]:
    for inner in (raw, raw.get("acceptance"), raw.get("total")):
        for key in ("conditional", "conditional_acceptance"):
            if isinstance(inner, dict) and isinstance(inner.get(key), list) and inner[key]:
                return list(inner[key])
    return []

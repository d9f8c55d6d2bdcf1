"""How much of a draft the target keeps, as a function of how much is drafted."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dflash_trt.core.files import exists
from dflash_trt.core.strict_json import read_json_object
from dflash_trt.errors import DflashError, one_line


@dataclass(frozen=True, slots=True)
class AcceptanceCurve:
    """Share of drafts accepted at each position, given that all before it in the block were.

    Item j of `conditional` is position j + 1's; `source` says whose figures these are.
    """

    conditional: tuple[float, ...]
    source: str

    @staticmethod
    def of_tau(
        tau: float, drafts: int, source: str, option: str = "--acceptance"
    ) -> AcceptanceCurve:
        """The curve that has `tau` with `drafts` positions and the same share at each.

        Measured curves are not quite flat: for a draft of block 16 with τ 6.33 on MATH-500 this
        says 4.93 at block 8, where 5.09 is published (arXiv 2602.06036).

        Raises:
            DflashError: τ below 1 or above what the drafts can give.
        """
        if not 1 <= tau <= drafts + 1:
            what = f"τ {tau:g} is not between 1 and {drafts + 1} (drafts + bonus)"
            raise DflashError(what, where=option, usage=True)
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


def read_acceptance(given: str, drafts: int) -> AcceptanceCurve:
    """`--acceptance`: τ at the trained block as a number, or a JSON file.

    The file has `conditional`, a list of shares by position, at its top or under `acceptance`:
    what `sweep` writes as summary.json of a run.

    Raises:
        DflashError: neither, or shares outside 0 … 1 (usage).
    """
    try:
        tau = float(given)
    except ValueError:
        return _read_file(Path(given), drafts)
    return AcceptanceCurve.of_tau(tau, drafts, f"given: τ {tau:g} at block {drafts + 1}")


def _read_file(path: Path, drafts: int) -> AcceptanceCurve:
    if not exists(path):
        what = f"{one_line(path, 80)!r} is neither a number nor a file"
        raise DflashError(what, where="--acceptance", usage=True)
    raw = read_json_object(path, named=True)
    inner = raw.get("acceptance")
    shares = (inner if isinstance(inner, dict) else raw).get("conditional")
    if not isinstance(shares, list) or not shares:
        raise DflashError("has no list `conditional`", where=path, usage=True)
    known = shares[: shares.index(None)] if None in shares else shares  # what blocks got to
    if not known or not all(
        isinstance(share, int | float) and not isinstance(share, bool) and 0 <= share <= 1
        for share in known
    ):
        raise DflashError("conditional must hold shares from 0 to 1", where=path, usage=True)
    return AcceptanceCurve(tuple(map(float, known[:drafts])), f"measured: {path.name}")

"""How a part of the check ended, and what it found until then."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from dflash_trt.proof.gpu_check.probe import Probe

Status = Literal[
    "done", "skipped", "failed", "died", "no answer", "out of time", "interrupted", "not run"
]
"""Ran to its end; needs what is not here; ended by an error; its process died; had to be ended when
its time was up; ended itself then; Ctrl-C; never begun."""


@dataclass(slots=True)
class PartOutcome:
    """A part's findings so far; `reason` says why it ended otherwise than done.

    `log` has the last lines of a process that died or gave no answer; `is_cut` says that the budget
    left it less than its own time, and that was up.
    """

    status: Status
    reason: str | None = None
    seconds: float = 0.0
    probes: list[Probe] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    is_cut: bool = False

    def is_final(self, *, is_long: bool) -> bool:
        """Whether a resumed check leaves it as it is; more time helps what ran out of it."""
        if self.status in ("out of time", "no answer"):
            return not (is_long or self.is_cut)
        return self.status not in ("interrupted", "not run")

    @property
    def is_broken(self) -> bool:
        """Whether its end alone says that something is wrong; what was cut may only be slow."""
        return self.status in ("failed", "died") or (self.status == "no answer" and not self.is_cut)

    @property
    def passed(self) -> bool | None:
        """None where nothing has a verdict; what is skipped or was not run has none."""
        verdicts = [one.passed for one in self.probes if one.passed is not None]
        if self.is_broken or not all(verdicts):
            return False
        return True if verdicts and self.status != "no answer" else None

    def to_json(self) -> dict[str, Any]:
        return {
            "status": self.status,
            "reason": self.reason,
            "is_cut": self.is_cut,
            "seconds": round(self.seconds, 3),
            "passed": self.passed,
            "probes": [one.to_json() for one in self.probes],
            "log": self.log,
        }

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> PartOutcome:
        probes = [Probe(**probe) for probe in raw["probes"]]
        return cls(raw["status"], raw["reason"], raw["seconds"], probes, raw["log"], raw["is_cut"])

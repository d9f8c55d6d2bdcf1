"""How a part of the check ended, and what it found until then."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from dflash_trt.proof.gpu_check.probe import Probe

Status = Literal["done", "skipped", "failed", "died", "out of time", "interrupted", "not run"]
"""Ran to its end; needs what is not here; ended by an error; its process died; its time was up;
Ctrl-C; never begun."""


@dataclass(slots=True)
class PartOutcome:
    """A part's findings so far; `reason` says why it ended otherwise than done.

    `log` has the last lines of a process that died or gave no answer.
    """

    status: Status
    reason: str | None = None
    seconds: float = 0.0
    probes: list[Probe] = field(default_factory=list)
    log: list[str] = field(default_factory=list)

    def is_final(self, *, is_long: bool) -> bool:
        """Whether a resumed check leaves it as it is; more time helps what ran out of it."""
        again = ("interrupted", "not run", *(["out of time"] if is_long else []))
        return self.status not in again

    @property
    def passed(self) -> bool | None:
        """None where nothing has a verdict; what is skipped or was not run has none."""
        verdicts = [one.passed for one in self.probes if one.passed is not None]
        if self.status in ("failed", "died"):
            return False
        return all(verdicts) if verdicts else None

    def to_json(self) -> dict[str, Any]:
        return {
            "status": self.status,
            "reason": self.reason,
            "seconds": round(self.seconds, 3),
            "passed": self.passed,
            "probes": [one.to_json() for one in self.probes],
            "log": self.log,
        }

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> PartOutcome:
        probes = [Probe(**probe) for probe in raw["probes"]]
        return cls(raw["status"], raw["reason"], raw["seconds"], probes, raw["log"])

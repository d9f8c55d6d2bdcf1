"""The error of a request that a served model did not answer, and whose fault it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from dflash_trt.errors import DflashError, one_line

Problem = Literal["refused", "unavailable", "overdue", "cancelled", "failed"]
# By code: how a model of ours says that a request ended (`decoding.jobs.Outcome`), and gRPC's
# statuses. Others: failed.
_PROBLEMS: dict[str, Problem] = {
    "refused": "refused",
    "overflow": "unavailable",
    "timed_out": "overdue",
    "cancelled": "cancelled",
    "INVALID_ARGUMENT": "refused",
    "OUT_OF_RANGE": "refused",
    "UNIMPLEMENTED": "refused",
    "UNAVAILABLE": "unavailable",
    "DEADLINE_EXCEEDED": "unavailable",
    "RESOURCE_EXHAUSTED": "unavailable",
    "NOT_FOUND": "unavailable",
    "CANCELLED": "cancelled",
}


class ServedModelError(DflashError):
    """A request that a served model did not answer.

    `problem` says whose fault it was: `refused` (the request's), `unavailable` (no server, no
    model, or a full queue: try later), `overdue` (it took longer than it may: again it would),
    `cancelled` (somebody else ended it), `failed` (the server's). `unreachable` says that nobody
    answers there (any more).
    """

    def __init__(
        self,
        what: str,
        problem: Problem,
        *,
        unreachable: bool = False,
        where: str | None = None,
        fix: str | None = None,
    ) -> None:
        super().__init__(what, where=where, fix=fix)
        self.problem: Problem = problem
        self.unreachable = unreachable


def explain(code: str, message: str | None, address: str) -> ServedModelError:
    """The error for a code of `_PROBLEMS`, and the text that came with it."""
    what = one_line(message or code or "no reason given")
    return ServedModelError(what, _PROBLEMS.get(code, "failed"), where=address)


def read_error(told: Sequence[bytes], address: str) -> ServedModelError:
    """The error in an output `error` of our models: TritonError's code, the outcome, the text."""
    *_, outcome, message = ["", *(text.decode(errors="replace") for text in told)]
    return explain(outcome, message, address)

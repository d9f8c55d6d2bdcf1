"""The error of a request that a served model did not answer, and whose fault it is."""

from __future__ import annotations

from typing import Literal

from dflash_trt.errors import DflashError, one_line
from dflash_trt.runtime.jobs import TOO_LATE

Problem = Literal["refused", "unavailable", "overdue", "cancelled", "failed"]
_PROBLEMS: dict[str, Problem] = {
    "INVALID_ARGUMENT": "refused",
    "INVALID_ARG": "refused",
    "OUT_OF_RANGE": "refused",
    "UNIMPLEMENTED": "refused",
    "UNAVAILABLE": "unavailable",
    "DEADLINE_EXCEEDED": "unavailable",
    "RESOURCE_EXHAUSTED": "unavailable",
    "NOT_FOUND": "unavailable",
    "CANCELLED": "cancelled",
}
# What gRPC itself says, under the same status that a server gives to a full queue.
_NOBODY_THERE = (
    "errors resolving",
    "failed to connect",
    "socket closed",
    "connection re",
    "goaway",
    "recvmsg",
)


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


def explain(status: str | None, message: str | None, address: str) -> ServedModelError:
    """The error for a gRPC status (`StatusCode.` may lead its name) and its text."""
    name = (status or "").removeprefix("StatusCode.")
    problem = _PROBLEMS.get(name, "failed")
    what = one_line(message or name or "no reason given")
    lost = name == "UNAVAILABLE" and any(sign in what.lower() for sign in _NOBODY_THERE)
    if lost or name == "DEADLINE_EXCEEDED":
        return ServedModelError(
            "no server answers there (any more)",
            problem,
            unreachable=True,
            where=address,
            fix="start one with `dflash-trt serve`",
        )
    # For which Triton server has no status of its own.
    overdue = name == "UNAVAILABLE" and what.endswith(TOO_LATE)
    return ServedModelError(what, "overdue" if overdue else problem, where=address)


def guess_status(message: str) -> str:
    """The status of an error that comes in a stream, where only its text does."""
    # Of a model's process that has died, of which the server starts no other.
    gone = ("unknown model", "is not ready", "no available versions", "Stub process")
    if any(sign in message for sign in gone):
        return "UNAVAILABLE"
    # The server's words when a model process has failed; else it refuses the request.
    failed = ("Failed to process the request", "Internal")
    return "INTERNAL" if any(sign in message for sign in failed) else "INVALID_ARGUMENT"

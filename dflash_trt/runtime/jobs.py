"""What a client wants of the generator, and how it ends."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from dflash_trt.errors import DflashError
from dflash_trt.runtime import Request, TokenEvent


class Outcome(StrEnum):
    """How a request ended."""

    COMPLETED = "completed"
    CANCELLED = "cancelled"
    REFUSED = "refused"
    OVERFLOW = "overflow"
    TIMED_OUT = "timed_out"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Failure:
    """The end of a request that got no result."""

    outcome: Outcome
    error: DflashError


@dataclass(slots=True, eq=False, kw_only=True)
class Job:
    """One request on its way through the generator.

    Args:
        request: what to run.
        listener: hears every event, on the worker's thread, and must not block it. The last thing
            it hears is an event with a result, or a Failure; after that nothing.
        deadline: moment of `time.perf_counter` after which it is ended; None is never.

    `cancelled` may be set by any thread; the generator's next step frees the slot.
    """

    request: Request
    listener: Callable[[TokenEvent | Failure], None]
    deadline: float | None = None
    arrived_at: float = field(default_factory=time.perf_counter)
    cancelled: bool = False

    @property
    def overdue(self) -> bool:
        return self.deadline is not None and time.perf_counter() > self.deadline

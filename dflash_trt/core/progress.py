"""Where long work says what it does; the command line draws it."""

from __future__ import annotations

from typing import Literal, Protocol

Unit = Literal["bytes", "steps", "tokens"]


class Progress(Protocol):
    """Stages, one after another."""

    def stage(self, name: str, total: int | None, unit: Unit = "bytes") -> None:
        """A new stage of `total` units begins; None when it is not measured."""

    def advance(self, count: int) -> None:
        """`count` more units of the current stage are done."""


class SilentProgress:
    """Progress that nobody watches."""

    def stage(self, name: str, total: int | None, unit: Unit = "bytes") -> None:
        pass

    def advance(self, count: int) -> None:
        pass

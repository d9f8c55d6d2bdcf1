"""What an answer's text is made of: content, reasoning, and calls of functions."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CallPiece:
    """New text of the answer's call number `index`; the one with a `name` begins it.

    `arguments` is text of the JSON object that the model writes, as it writes it.
    """

    index: int
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class AnswerPiece:
    """New text of an answer."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[CallPiece, ...] = ()

    def __add__(self, other: AnswerPiece) -> AnswerPiece:
        return AnswerPiece(
            self.content + other.content,
            self.reasoning + other.reasoning,
            self.calls + other.calls,
        )

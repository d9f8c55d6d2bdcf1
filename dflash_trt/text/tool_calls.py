"""Calls of functions in an answer's text, told apart as the text comes.

Hermes' form, which Qwen's models have too, is `{"name": …, "arguments": {…}}` between `<tool_call>`
and `</tool_call>`, anywhere in an answer. Llama 3's is an answer that is all of
`{"name": …, "parameters": {…}}`, or what follows `<|python_tag|>`. What begins as a call and is
none, or is one of a function that was not offered, stays the text it is. No token changes by it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass

from dflash_trt.core.strict_json import parse_json
from dflash_trt.errors import DflashError
from dflash_trt.text.detokenise import AnswerPiece, CallPiece, count_begun

_NAME = r'\s*\{\s*"name"\s*:\s*"((?:[^"\\]|\\.)*)"'
_HEAD = re.compile(_NAME + r'\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
# A bare object that begins otherwise is an answer; its keys may stand in another order.
_NAMED = re.compile(_NAME)
_OTHER_ORDER = re.compile(r'\s*\{\s*"(?:type|arguments|parameters)"\s*:')
_UNDECIDED = re.compile(
    r'\s*(?:\{\s*(?:"\w{0,10}"?\s*|"name"\s*:\s*(?:"(?:[^"\\]|\\.){0,256}\\?)?)?)?'
)


@dataclass(frozen=True, slots=True)
class CallMarks:
    """How a family marks its calls.

    Args:
        opening, closing: texts around a call; no `closing` where the object's end is the call's.
        is_bare: a call may be the answer itself, without `opening`.
    """

    opening: str
    closing: str
    is_bare: bool


HERMES = CallMarks("<tool_call>", "</tool_call>", is_bare=False)
LLAMA_3 = CallMarks("<|python_tag|>", "", is_bare=True)


class CallStream:
    """One answer's text, as it comes, to its content and its calls of the functions `names`.

    Blanks before a call are no content, nor are blanks at the end of an answer with calls.
    """

    def __init__(self, marks: CallMarks, names: Collection[str]) -> None:
        self._marks, self._names = marks, frozenset(names)
        self._buffer = ""
        self._held = ""
        """What stands before the buffer if that turns out to be no call."""
        self._scanner, self._scanned = _ObjectEnd(), 0
        self._count = 0
        self._turn: Callable[[], AnswerPiece | None] = (
            self._begin if marks.is_bare else self._read_text
        )

    def push(self, text: str) -> AnswerPiece:
        """What is certain after this text; may be empty."""
        self._buffer += text
        whole = AnswerPiece()
        while (piece := self._turn()) is not None:
            whole += piece
        return whole

    def flush(self) -> AnswerPiece:
        """What is still held back; call once, at the end of the answer."""
        rest, self._buffer = self._buffer, ""
        if self._turn == self._end_call:
            return AnswerPiece()
        if self._turn == self._read_call:
            call = _read_object(rest.removesuffix(self._marks.closing), self._names)
            return AnswerPiece(self._held + rest) if call is None else self._call(*call)
        return AnswerPiece() if self._count and not rest.strip() else AnswerPiece(rest)

    def _begin(self) -> AnswerPiece | None:
        rest = self._buffer.lstrip() if not self._count else self._buffer.lstrip("; \t\r\n")
        if not rest:
            return None
        if rest[0] == "{":
            self._hold(len(self._buffer) - len(rest))
            self._turn = self._read_call
        else:
            self._turn = self._read_text
        return AnswerPiece()

    def _read_text(self) -> AnswerPiece | None:
        opening = self._marks.opening
        at = self._buffer.find(opening)
        if at >= 0:
            content = self._buffer[:at].rstrip()
            self._hold(at + len(opening), len(content))
            self._turn = self._read_call
            return AnswerPiece(content)
        begun = count_begun(self._buffer, opening)
        certain = self._buffer[: len(self._buffer) - begun].rstrip()
        self._buffer = self._buffer[len(certain) :]
        return AnswerPiece(certain) if certain else None

    def _read_call(self) -> AnswerPiece | None:
        head = _HEAD.match(self._buffer)
        if head is not None and (name := _unquote(head[1])) in self._names:
            self._buffer = self._buffer[head.end() :]
            self._scanner, self._turn = _ObjectEnd(), self._read_arguments
            return self._call(name, "")
        end = self._find_end()
        if end is None:
            return None
        call = _read_object(self._buffer[: end[0]], self._names)
        if call is None:
            return self._leave()
        self._buffer = self._buffer[end[1] :]
        self._turn = self._after_call()
        return self._call(*call)

    def _find_end(self) -> tuple[int, int] | None:
        """Where what cannot be read from its head ends, and its mark; None while it may go on."""
        closing = self._marks.closing
        if closing:
            at = self._buffer.find(closing)
            return None if at < 0 else (at, at + len(closing))
        if _UNDECIDED.fullmatch(self._buffer):
            return None
        named = _NAMED.match(self._buffer)
        is_known = named is not None and _unquote(named[1]) in self._names
        if not is_known and not _OTHER_ORDER.match(self._buffer):
            return (0, 0)
        size = self._scanner.find(self._buffer[self._scanned :])
        if size is None:
            self._scanned = len(self._buffer)
            return None
        return (self._scanned + size, self._scanned + size)

    def _leave(self) -> AnswerPiece:
        again = self._buffer.find(self._marks.opening)
        closing = self._marks.closing
        at = self._buffer.find(closing) + len(closing) if closing else 0
        if 0 <= again < at:
            at = again
        piece = AnswerPiece(self._held + self._buffer[:at])
        self._buffer, self._turn = self._buffer[at:], self._read_text
        return piece

    def _read_arguments(self) -> AnswerPiece | None:
        if not self._buffer:
            return None
        size = self._scanner.find(self._buffer)
        if size is not None:
            self._turn = self._end_call
        text, self._buffer = self._buffer[:size], self._buffer[len(self._buffer[:size]) :]
        return AnswerPiece(calls=(CallPiece(self._count - 1, None, text),))

    def _end_call(self) -> AnswerPiece | None:
        """The brace after the arguments, and the mark; anything else is text again."""
        rest, closing = self._buffer.lstrip(), self._marks.closing
        if rest.startswith("}"):
            rest = rest[1:].lstrip() if closing else rest[1:]
        is_begun = not rest or (rest != closing and closing.startswith(rest))
        if is_begun and (closing or "}" not in self._buffer):
            return None
        self._buffer = rest.removeprefix(closing)
        self._turn = self._after_call()
        return AnswerPiece()

    def _after_call(self) -> Callable[[], AnswerPiece | None]:
        return self._begin if self._marks.is_bare else self._read_text

    def _call(self, name: str, arguments: str) -> AnswerPiece:
        self._count += 1
        return AnswerPiece(calls=(CallPiece(self._count - 1, name, arguments),))

    def _hold(self, size: int, told: int = 0) -> None:
        """Takes `size` characters out of the buffer, of which `told` have been passed on."""
        held = self._buffer[told:size]
        # A special token has no text: Llama's mark is none of an answer.
        self._held = held.removesuffix(self._marks.opening) if self._marks.is_bare else held
        self._buffer = self._buffer[size:]
        self._scanner, self._scanned = _ObjectEnd(), 0


class _ObjectEnd:
    """Finds the end of a JSON object whose text comes in pieces; the first one begins it."""

    def __init__(self) -> None:
        self._depth, self._in_string, self._escaped = 0, False, False

    def find(self, text: str) -> int | None:
        """How much of this piece the object takes; None where it goes on after it."""
        for place, character in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                self._escaped = character == "\\"
                self._in_string = character != '"'
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return place + 1
        return None


def _unquote(inner: str) -> str:
    try:
        return str(json.loads(f'"{inner}"'))
    except ValueError:
        return ""


def _read_object(text: str, names: Collection[str]) -> tuple[str, str] | None:
    try:
        value = parse_json(text.encode(errors="replace"), "call")
    except DflashError:
        return None
    if not isinstance(value, dict):
        return None
    name, arguments = value.get("name"), value.get("arguments", value.get("parameters"))
    if not isinstance(name, str) or name not in names or not isinstance(arguments, dict):
        return None
    return name, json.dumps(arguments, ensure_ascii=False)

"""Text of a growing token sequence: whole characters only, nothing lost, cut at stop strings.

Also what such text is made of, and how many stop strings a request may have.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from tokenizers import AddedToken, Tokenizer

from dflash_trt.errors import DflashError
from dflash_trt.text.tokenizer_calls import decode

UNDECODED = "�"

# Every token of an answer is compared with all stop strings of its request, in the thread that all
# requests share: what has no limit here slows everybody.
MAX_STOP_STRINGS = 64
MAX_STOP_CHARACTERS = 4096
MAX_STOP_IDS = 256


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


def check_stop_strings(stop_strings: Sequence[str]) -> None:
    """Raises DflashError (usage) for more, or longer, stop strings than a request may have.

    Also for one that is not Unicode: it could never be found.
    """
    where = "stop_strings"
    if len(stop_strings) > MAX_STOP_STRINGS:
        raise _too_much(where, f"{len(stop_strings):,} stop strings", MAX_STOP_STRINGS)
    characters = sum(map(len, stop_strings))
    if characters > MAX_STOP_CHARACTERS:
        what = f"{characters:,} characters of stop strings"
        raise _too_much(where, what, MAX_STOP_CHARACTERS)
    for text in stop_strings:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            what = f"{text[:40]!a} is not Unicode text at character {error.start}"
            raise DflashError(what, where=where, usage=True) from error


def check_stop_ids(token_ids: Sequence[int]) -> None:
    """Raises DflashError (usage) for more stop tokens than a request may have."""
    if len(token_ids) > MAX_STOP_IDS:
        raise _too_much("stop_token_ids", f"{len(token_ids):,} stop tokens", MAX_STOP_IDS)


def _too_much(where: str, what: str, most: int) -> DflashError:
    return DflashError(f"{what} are more than {most:,}", where=where, fix="send fewer", usage=True)


def special_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Ids of the tokens that have no text unless they are shown."""
    added = tokenizer.get_added_tokens_decoder()
    return frozenset(token_id for token_id, token in added.items() if token.special)


class Detokenizer:
    """Turns tokens into text piece by piece; the pieces join to the decode of all tokens.

    Special tokens have no text, but for the ids that are `shown`. A character whose bytes are
    spread over several tokens is held back until it is whole; `flush` releases what is left as the
    tokenizer renders it.
    Exact for byte-level BPE; for tokenizers with byte fallback too, where a run of byte
    tokens is decoded as one unit and therefore held back until the run ends.
    """

    def __init__(self, tokenizer: Tokenizer, shown: Collection[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._special_ids = special_ids(tokenizer).difference(shown)
        fallback = (tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
        self._byte_ids = {token_id for token_id in fallback if token_id is not None}
        # A decoder may treat the first token of a sequence in its own way (drop a leading
        # space), so decoding starts `_context` tokens before the first unsettled one.
        self._window: list[int] = []
        self._context = 0
        self._emitted = 0

    def push(self, token_id: int) -> str:
        """The text that is certain after `token_id`; may be empty. DflashError: see `decode`."""
        if token_id in self._special_ids:
            return ""
        self._window.append(token_id)
        if token_id in self._byte_ids:
            return ""
        text = self._decode(self._window)
        # Only the last character can still change: at most one is incomplete.
        if text.endswith(UNDECODED):
            return self._emit(text[:-1])
        piece = self._emit(text)
        del self._window[: self._context]
        self._context = len(self._window)
        self._emitted = len(self._decode(self._window))
        return piece

    def flush(self) -> str:
        """The text still held back; call once, after the last token.

        U+FFFD where the tokenizer fails to decode it: the request has ended, whoever asks.
        """
        try:
            return self._emit(self._decode(self._window))
        except DflashError:
            return UNDECODED

    def _decode(self, token_ids: list[int]) -> str:
        return decode(self._tokenizer, token_ids)

    def _emit(self, settled: str) -> str:
        piece = settled[self._emitted :]
        self._emitted = max(self._emitted, len(settled))
        return piece


class StopStrings:
    """Passes text on, up to the first stop string; holds back what might begin one.

    With `keeps_stop` the stop string is passed on too.
    """

    def __init__(self, stop_strings: Sequence[str], *, keeps_stop: bool = False) -> None:
        self._stop_strings, self._keeps_stop = tuple(stop_strings), keeps_stop
        self._held = ""
        self.match: str | None = None
        """The stop string that was completed, the first in the text."""

    def push(self, piece: str) -> str:
        """The text now certain to come before any stop string; empty once one was found."""
        if self.match is not None or not piece:
            return ""
        if not self._stop_strings:
            return piece
        text = self._held + piece
        found = [(at, stop) for stop in self._stop_strings if (at := text.find(stop)) >= 0]
        if found:
            (at, self.match), self._held = min(found), ""
            return text[:at] + (self.match if self._keeps_stop else "")
        certain = len(text) - max(
            (count_begun(text, stop) for stop in self._stop_strings), default=0
        )
        self._held = text[certain:]
        return text[:certain]

    def flush(self) -> str:
        """The text held back, once nothing can follow it."""
        held, self._held = self._held, ""
        return held


def count_begun(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`, and is not all of it."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


def _is_read_as(text: str, token: AddedToken) -> bool:
    """Whether a tokenizer reads the text as this one token, which may take blanks beside it."""
    text = text.lstrip() if token.lstrip else text
    return token.content == (text.rstrip() if token.rstrip else text)


class TextStream:
    """A request's text: detokenised, and cut before (or behind) its first stop string.

    A stop string that is a special token, which has no text, ends it where that token comes.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop_strings: Sequence[str],
        shown: Collection[int] = (),
        *,
        keeps_stop: bool = False,
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, shown)
        self._stop_strings = StopStrings(stop_strings, keeps_stop=keeps_stop)
        added = tokenizer.get_added_tokens_decoder() if stop_strings else {}
        self._stop_tokens = {
            token_id: stop
            for token_id, token in added.items()
            for stop in stop_strings
            if token.special and token_id not in shown and _is_read_as(stop, token)
        }
        self.decoded = 0
        """Characters so far, whether they are certain to be shown or not."""

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text, once one was completed."""
        return self._stop_strings.match

    def push(self, token_id: int) -> str:
        if token_id in self._stop_tokens:
            text = self.flush()
            self._stop_strings.match = self._stop_strings.match or self._stop_tokens[token_id]
            return text
        text = self._detokenizer.push(token_id)
        self.decoded += len(text)
        return self._stop_strings.push(text)

    def flush(self) -> str:
        """What is still held back; a stop string may be completed only here."""
        piece = self._stop_strings.push(self._detokenizer.flush())
        return piece + self._stop_strings.flush()

"""gpt-oss's harmony output: messages on channels, told apart token by token.

Format: https://github.com/openai/harmony, docs/format.md. A message is
`<|start|>assistant<|channel|>NAME<|message|>TEXT<|end|>`; the prompt ends with the first one's
`<|start|>assistant`. `analysis` is reasoning, all else the answer. A message with a recipient
(`to=functions.name`) calls a tool: one that was offered is a call; any other stays in the answer as
it is, special tokens included.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from tokenizers import Tokenizer

from dflash_trt.text.detokenise import AnswerPiece, CallPiece, TextStream
from dflash_trt.text.tokenizer_calls import decode

START, END, MESSAGE, CHANNEL = "<|start|>", "<|end|>", "<|message|>", "<|channel|>"
RETURN, CALL, CONSTRAIN = "<|return|>", "<|call|>", "<|constrain|>"
_NEEDED = (START, END, MESSAGE, CHANNEL, RETURN)
_ENDS = (END, RETURN, CALL)
_REASONING_CHANNEL = "analysis"
_ROLE, _RECIPIENT = "assistant", "to="
_FUNCTION = re.compile(r"to=functions\.([\w-]+)")
_LONGEST_HEADER = 256  # characters, beyond which what began as a header is text


class HarmonyFormat:
    """A tokenizer whose special tokens are harmony's."""

    def __init__(self, tokenizer: Tokenizer, special: dict[int, str]) -> None:
        self.tokenizer = tokenizer
        self.special = special

    @staticmethod
    def find(tokenizer: Tokenizer) -> HarmonyFormat | None:
        """None for a tokenizer of another format."""
        added = tokenizer.get_added_tokens_decoder()
        special = {
            token_id: token.content
            for token_id, token in added.items()
            if token.special and token.content in (*_NEEDED, CALL, CONSTRAIN)
        }
        if not set(_NEEDED) <= set(special.values()):
            return None
        return HarmonyFormat(tokenizer, special)

    def open(
        self, stop_strings: Sequence[str] = (), functions: Collection[str] = ()
    ) -> HarmonyStream:
        """A stream for one answer; each message is cut before its first stop string.

        Messages to one of the `functions` are calls.
        """
        return HarmonyStream(self, stop_strings, functions)


class HarmonyStream:
    """One answer's tokens, as they come, to its content and its reasoning.

    Text outside of any message, which a well-formed answer does not have, is content.
    """

    def __init__(
        self, form: HarmonyFormat, stop_strings: Sequence[str], functions: Collection[str] = ()
    ) -> None:
        self._form, self._functions = form, frozenset(functions)
        self._calls = 0
        self._is_told = False  # the message is a call of one of the functions
        self._stop_strings = tuple(stop_strings)
        self._header: list[int] | None = []  # the prompt has begun it; None outside of a header
        self._is_reasoning = False
        self._is_call = False
        self.reasoning_tokens = 0
        self._text = self._open_text()

    def push(self, token_ids: Sequence[int]) -> AnswerPiece:
        """The text that is certain after these tokens; may be empty."""
        pieces = AnswerPiece()
        for token_id in token_ids:
            special = self._form.special.get(token_id)
            pieces += self._take(token_id) if special is None else self._turn(token_id, special)
        return pieces

    def flush(self) -> AnswerPiece:
        """The text still held back; call once, after the last token."""
        return self._end_text() if self._header is None else self._end_header()

    def _take(self, token_id: int) -> AnswerPiece:
        """An ordinary token, or a special one of another format, which has no text."""
        if self._header is None:
            self.reasoning_tokens += self._is_reasoning
            return self._say(self._text.push(token_id))
        self._header.append(token_id)
        return AnswerPiece() if self._may_be_header() else self._leave_header()

    def _turn(self, token_id: int, special: str) -> AnswerPiece:
        if special == START:
            return self._begin_header([])
        if special in _ENDS:
            piece = self.flush()
            if self._is_call and not self._is_told:
                piece += AnswerPiece(content=special)
            self._header, self._is_reasoning = None, False
            self._is_call = self._is_told = False
            return piece
        if self._header is None:
            # A channel may come without its <|start|>, which models leave out at times.
            return self._begin_header([token_id]) if special == CHANNEL else AnswerPiece()
        if special == MESSAGE:
            return self._begin_message()
        self._header.append(token_id)
        return AnswerPiece()

    def _begin_header(self, token_ids: list[int]) -> AnswerPiece:
        piece = self._end_text()
        self._header = token_ids
        return piece

    def _begin_message(self) -> AnswerPiece:
        header = self._decode_header()
        channel = header.partition(CHANNEL)[2].split(maxsplit=1)
        self._is_call = _RECIPIENT in header
        self._is_reasoning = channel[:1] == [_REASONING_CHANNEL] and not self._is_call
        self._header = None
        self._text = self._open_text()
        function = _FUNCTION.search(header)
        self._is_told = function is not None and function[1] in self._functions
        if function is not None and self._is_told:
            self._calls += 1
            return AnswerPiece(calls=(CallPiece(self._calls - 1, function[1]),))
        shown = header.removeprefix(_ROLE) + MESSAGE
        return AnswerPiece(content=shown if self._is_call else "")

    def _leave_header(self) -> AnswerPiece:
        held, self._header = self._header or [], None
        self._is_reasoning = self._is_told = False
        return self._say("".join(map(self._text.push, held)))

    def _end_header(self) -> AnswerPiece:
        """A message that ended here says nothing, unless it never was a header."""
        if self._has_special() or self._decode_header().strip() == _ROLE:
            return AnswerPiece()
        return self._leave_header() + self._end_text()

    def _may_be_header(self) -> bool:
        text = self._decode_header().lstrip()
        if len(text) > _LONGEST_HEADER:
            return False
        known = (_RECIPIENT, f"{_ROLE} {_RECIPIENT}")
        begins = any(one.startswith(text) or text.startswith(one) for one in known)
        return begins or self._has_special()

    def _has_special(self) -> bool:
        return any(token_id in self._form.special for token_id in self._header or ())

    def _decode_header(self) -> str:
        return decode(self._form.tokenizer, self._header or [])

    def _say(self, text: str) -> AnswerPiece:
        if self._is_told:
            calls = (CallPiece(self._calls - 1, None, text),) if text else ()
            return AnswerPiece(calls=calls)
        return AnswerPiece(reasoning=text) if self._is_reasoning else AnswerPiece(content=text)

    def _end_text(self) -> AnswerPiece:
        piece = self._say(self._text.flush())
        self._text = self._open_text()
        return piece

    def _open_text(self) -> TextStream:
        return TextStream(self._form.tokenizer, self._stop_strings)

"""An answer as it comes from the model, to its content, its reasoning and its calls."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tokenizers import Tokenizer

from dflash_trt.serving.client.client import GenerationRequest
from dflash_trt.serving.openai.errors import ApiError
from dflash_trt.text.detokenise import AnswerPiece, TextStream
from dflash_trt.text.harmony import HarmonyFormat
from dflash_trt.text.thoughts import AnswerFormat, TokenReader
from dflash_trt.text.tool_calls import CallStream
from dflash_trt.text.tools import ToolFormat, ToolUse


class AnswerReader:
    """Reads one answer; by its tokens where there is a `tokens` and the server sends them."""

    def __init__(self, tokens: TokenReader | None = None, calls: CallStream | None = None) -> None:
        self._tokens, self._calls = tokens, calls
        self._has_tokens = False

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of reasoning so far, where it is told apart."""
        return 0 if self._tokens is None else self._tokens.reasoning_tokens

    def push(self, text: str, token_ids: Sequence[int]) -> AnswerPiece:
        """What is certain after these tokens, whose text this is; may be empty."""
        if self._tokens is None or not token_ids:
            return self._find_calls(AnswerPiece(text))
        self._has_tokens = True
        return self._find_calls(self._tokens.push(token_ids))

    def flush(self) -> AnswerPiece:
        """What is still held back; call once, at the end."""
        piece = AnswerPiece()
        if self._tokens is not None and self._has_tokens:
            piece = self._find_calls(self._tokens.flush())
        return piece if self._calls is None else piece + self._calls.flush()

    def _find_calls(self, piece: AnswerPiece) -> AnswerPiece:
        if self._calls is None:
            return piece
        return AnswerPiece(reasoning=piece.reasoning) + self._calls.push(piece.content)


class _MarkedText:
    """Text with the special tokens that mark calls."""

    def __init__(
        self, tokenizer: Tokenizer, stop_strings: Sequence[str], marks: Collection[int]
    ) -> None:
        self._text = TextStream(tokenizer, stop_strings, marks)
        self.reasoning_tokens = 0

    def push(self, token_ids: Sequence[int]) -> AnswerPiece:
        return AnswerPiece("".join(map(self._text.push, token_ids)))

    def flush(self) -> AnswerPiece:
        return AnswerPiece(self._text.flush())


def open_reader(
    tokenizer: Tokenizer,
    asked: GenerationRequest,
    answers: AnswerFormat | None,
    form: ToolFormat | None,
    use: ToolUse | None,
    *,
    separates: bool,
) -> AnswerReader:
    """A reader of one answer to a chat's prompt, which may call as `use` says.

    `answers` tells its reasoning apart; unless it `separates`, what marks it is text.
    """
    stops = asked.stop_strings
    calls, marks = None, frozenset[int]()
    tokens: TokenReader | None = None
    if isinstance(answers, HarmonyFormat):
        names = [] if use is None else [one.name for one in use.callable]
        tokens = answers.open(stops, names)
    else:
        if use is not None and form is not None:
            calls, marks = form.open(use), form.hidden_marks(tokenizer)
        if answers is not None and separates:
            bound = asked.grammar is not None
            tokens = answers.open(stops, asked.prompt, marks, bound=bound)
        else:
            marks |= answers.marks_shown if answers is not None else frozenset()
            tokens = _MarkedText(tokenizer, stops, marks) if marks else None
    for name, asks in (
        ("skip_special_tokens", not asked.skip_special_tokens),
        ("include_stop_str_in_output", asked.include_stop_str_in_output),
    ):
        if asks and tokens is not None:
            what = "does not go with an answer whose parts special tokens mark; use /v1/completions"
            raise ApiError(what, param=name)
    return AnswerReader(tokens, calls)

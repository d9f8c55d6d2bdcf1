"""Reasoning that stands in an answer between two tokens, told apart from the rest.

Qwen3, Qwen3.5 and Qwen3.6 reason between `<think>` and `</think>`, ordinary added tokens; Gemma 4
between `<|channel>` with the word thought and `<channel|>`, special ones
(https://ai.google.dev/gemma/docs/core/prompt-formatting-gemma4). A template may write the first
mark itself, at the end of the prompt: the answer then begins inside of the reasoning. Where
thinking is off it writes both, and all is content that does not open reasoning again.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from tokenizers import Tokenizer

from dflash_trt.text.detokenise import AnswerPiece, TextStream, count_begun
from dflash_trt.text.harmony import HarmonyFormat
from dflash_trt.text.tokenizer_calls import decode

_PROMPT_TAIL = 16  # tokens of a prompt, among which a mark stands that its template wrote last


@dataclass(frozen=True, slots=True)
class ThoughtMarks:
    """How a family marks reasoning.

    Args:
        opening, closing: tokens around it.
        label: a word that stands behind the opening and is no reasoning.
        shown: other special tokens of an answer, which are its text: blocks of calls.
    """

    opening: str
    closing: str
    label: str = ""
    shown: tuple[str, ...] = ()


QWEN = ThoughtMarks("<think>", "</think>")
GEMMA_4 = ThoughtMarks(
    "<|channel>", "<channel|>", "thought", ("<|tool_call>", "<tool_call|>", '<|"|>')
)


class ThoughtFormat:
    """A tokenizer that has a family's marks."""

    def __init__(self, tokenizer: Tokenizer, marks: ThoughtMarks, added: dict[str, int]) -> None:
        self.tokenizer, self.marks = tokenizer, marks
        self.opening, self.closing = added[marks.opening], added[marks.closing]
        self.shown = frozenset(at for text, at in added.items() if text in marks.shown)
        special = tokenizer.get_added_tokens_decoder()
        # One that is no text by itself opens reasoning wherever it stands.
        self.opens_anywhere = special[self.opening].special
        both = (self.opening, self.closing) if self.opens_anywhere else ()
        self.marks_shown = self.shown | {*both}
        """Ids of special tokens that are text where reasoning is not told apart."""

    @staticmethod
    def find(tokenizer: Tokenizer) -> ThoughtFormat | None:
        """None for a tokenizer without such marks."""
        added = {one.content: at for at, one in tokenizer.get_added_tokens_decoder().items()}
        for marks in (QWEN, GEMMA_4):
            if marks.opening in added and marks.closing in added:
                return ThoughtFormat(tokenizer, marks, added)
        return None

    def state_after(self, prompt: str | Sequence[int]) -> bool | None:
        """Whether an answer to the prompt, text or token ids, begins inside of reasoning.

        None where the prompt ends with neither mark, and the answer may open it itself.
        """
        if isinstance(prompt, str):
            text = prompt.rstrip()
        else:
            text = decode(self.tokenizer, list(prompt[-_PROMPT_TAIL:])).rstrip()
        if text.endswith(self.marks.closing):
            return False
        text = text.removesuffix(self.marks.label).rstrip()
        return True if text.endswith(self.marks.opening) else None

    def open(
        self,
        stop_strings: Sequence[str],
        prompt: str | Sequence[int],
        shown: Collection[int] = (),
        *,
        bound: bool = False,
    ) -> ThoughtStream:
        """A stream for the answer to a prompt; each part is cut before its first stop string.

        `shown` are special tokens that are text beside the marks' own. An answer is `bound` whose
        grammar begins with `grammar`: its reasoning may end with the mark's text.
        """
        thinking = self.state_after(prompt) is True
        shown = self.shown | {*shown}
        return ThoughtStream(self, stop_strings, shown, thinking=thinking, bound=bound)

    def grammar(self, prompt: str) -> str:
        """Rules of llguidance's Lark for what may stand before a bound answer: `thought`.

        Empty where that is nothing. The closing mark may be its token, or spelled.
        """
        state = self.state_after(prompt)
        if state is False:
            return ""
        mark = json.dumps(self.marks.closing)
        begun = "thought: rest" if state else f"thought: (<[{self.opening}]> rest)?"
        return (
            f"{begun} THOUGHT_BLANKS?\nTHOUGHT_BLANKS: /[ \\n]{{1,4}}/\nTHOUGHT: /(.|\\n)*/\n"
            f"rest: spelled_end | THOUGHT <[{self.closing}]>\nspelled_end[lazy]: THOUGHT {mark}"
        )


class ThoughtStream:
    """One answer's tokens, as they come, to its content and its reasoning.

    Blanks beside the marks are neither.
    """

    def __init__(
        self,
        form: ThoughtFormat,
        stop_strings: Sequence[str],
        shown: Collection[int],
        *,
        thinking: bool,
        bound: bool,
    ) -> None:
        self._form, self._shown, self._bound = form, shown, bound
        self._stop_strings = tuple(stop_strings)
        self._thinking = thinking
        self._has_thought = thinking
        self._has_said = False  # anything but blanks, in this part
        self._held = ""  # blanks, of which it is not known whether they count
        self.reasoning_tokens = 0
        self._begun = ""  # text of reasoning that may be the mark's that ends it
        self._label: str | None = None  # what came where a label may stand
        self._text = self._open_text()

    def push(self, token_ids: Sequence[int]) -> AnswerPiece:
        """The text that is certain after these tokens; may be empty."""
        pieces = AnswerPiece()
        for token_id in token_ids:
            was_thinking = self._thinking
            pieces += self._take(token_id)
            self.reasoning_tokens += was_thinking and self._thinking
        return pieces

    def flush(self) -> AnswerPiece:
        """The text still held back; call once, after the last token."""
        piece = self._end_part()
        if self._thinking or self._has_thought:
            return piece
        return piece + AnswerPiece(self._held)

    def _take(self, token_id: int) -> AnswerPiece:
        form = self._form
        if self._thinking and token_id == form.closing:
            return self._turn(thinking=False)
        may_open = form.opens_anywhere or not (self._has_said or self._has_thought)
        if not self._thinking and token_id == form.opening and may_open:
            piece = self._turn(thinking=True)
            self._label = "" if form.marks.label else None
            return piece
        return self._hear(self._text.push(token_id))

    def _turn(self, *, thinking: bool) -> AnswerPiece:
        piece = self._end_part()
        self._begin_part(thinking=thinking)
        return piece

    def _begin_part(self, *, thinking: bool) -> None:
        self._thinking = thinking
        self._has_thought, self._has_said, self._held = True, False, ""

    def _end_part(self) -> AnswerPiece:
        piece = self._hear(self._text.flush())
        begun, self._begun = self._begun, ""
        piece += self._say(begun) + self._end_label()
        self._text = self._open_text()
        return piece

    def _end_label(self) -> AnswerPiece:
        label, self._label = self._label, None
        return self._say("" if label is None or label == self._form.marks.label else label)

    def _hear(self, text: str) -> AnswerPiece:
        """New text; in reasoning of a bound answer it may be the mark that ends it."""
        if not (self._bound and self._thinking):
            return self._say(text)
        mark = self._form.marks.closing
        thought, ended, answer = (self._begun + text).partition(mark)
        if not ended:
            certain = len(thought) - count_begun(thought, mark)
            self._begun = thought[certain:]
            return self._say(thought[:certain])
        self._begun = ""
        piece = self._say(thought) + self._end_label()
        self._begin_part(thinking=False)
        return piece + self._say(answer)

    def _say(self, text: str) -> AnswerPiece:
        if self._label is not None:
            label = self._form.marks.label
            known, self._label = self._label + text, None
            if label.startswith(known):  # it may still be the label, or is all of it
                self._label = known
                return AnswerPiece()
            rest = known.removeprefix(label)
            text = rest if rest[:1].isspace() else known
        text = self._held + text
        if self._thinking:
            text, self._held = text.rstrip(), text[len(text.rstrip()) :]
        elif not self._has_said:
            self._held = "" if text.strip() else text
            text = text.removesuffix(self._held)
        else:
            self._held = ""
        if not self._has_said and self._has_thought:
            text = text.lstrip()
        self._has_said |= bool(text)
        return AnswerPiece(reasoning=text) if self._thinking else AnswerPiece(text)

    def _open_text(self) -> TextStream:
        return TextStream(self._form.tokenizer, self._stop_strings, self._shown)


AnswerFormat = HarmonyFormat | ThoughtFormat
"""What tells an answer from its reasoning."""


class TokenReader(Protocol):
    """What reads token ids, for what the text does not show.

    `reasoning_tokens` counts those of reasoning, without its marks.
    """

    reasoning_tokens: int

    def push(self, token_ids: Sequence[int]) -> AnswerPiece: ...

    def flush(self) -> AnswerPiece: ...


def find_format(tokenizer: Tokenizer) -> AnswerFormat | None:
    """The format of a tokenizer's model; None where it does not mark reasoning."""
    return HarmonyFormat.find(tokenizer) or ThoughtFormat.find(tokenizer)


def open_answer(
    form: AnswerFormat, stop_strings: Sequence[str], prompt: str | Sequence[int]
) -> TokenReader:
    """A stream for the answer to `prompt`, without calls."""
    if isinstance(form, HarmonyFormat):
        return form.open(stop_strings)
    return form.open(stop_strings, prompt)

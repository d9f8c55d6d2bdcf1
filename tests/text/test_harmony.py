"""Harmony's channels: the answer, the reasoning and tool calls, however the tokens arrive."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_trt.text.detokenise import AnswerPiece
from dflash_trt.text.harmony import HarmonyFormat
from tests.text.harmony import ANALYSIS, CALL, FINAL, SPECIAL, encode, make_harmony

FORM = HarmonyFormat.find(make_harmony())
THOUGHT = "Simple: 2 + 2, é 🙂."
PREAMBLE = "<|start|>assistant<|channel|>commentary<|message|>I will look. <|end|>"
# The recipient may stand with the role too, also in the first message.
CALL_IN_ROLE = ' to=functions.get<|channel|>commentary <|constrain|>json<|message|>{"a": 1}<|call|>'


def _parse(text: str, *, stops: tuple[str, ...] = (), at_once: bool = False) -> AnswerPiece:
    assert FORM is not None
    stream = FORM.open(stops)
    ids = encode(text)
    whole = AnswerPiece()
    for piece in [ids] if at_once else [[token_id] for token_id in ids]:
        whole += stream.push(piece)
    return whole + stream.flush()


def test_text_comes_as_its_tokens_do() -> None:
    assert FORM is not None
    stream = FORM.open()
    seen = [stream.push([token_id]) for token_id in encode(ANALYSIS + FINAL)]
    reasoning = [piece.reasoning for piece in seen if piece.reasoning]
    content = [piece.content for piece in seen if piece.content]
    assert reasoning[:3] == ["S", "i", "m"] and "🙂" in reasoning
    assert content[:3] == ["2", " ", "+"] and "🙂" in content


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (ANALYSIS + FINAL, AnswerPiece("2 + 2 = 4 🙂.", THOUGHT)),
        # A tool call stays as the text it is.
        (ANALYSIS + CALL, AnswerPiece(CALL.removeprefix("<|start|>assistant"), THOUGHT)),
        (CALL_IN_ROLE, AnswerPiece(CALL_IN_ROLE)),
        (ANALYSIS + PREAMBLE + ANALYSIS, AnswerPiece("I will look. ", 2 * THOUGHT)),
        # What follows is not well-formed.
        ("plain text, no header", AnswerPiece("plain text, no header")),
        ("to be or not", AnswerPiece("to be or not")),
        ("assistance", AnswerPiece("assistance")),
        ("assistant is", AnswerPiece("assistant is")),
        ("<|channel|>ana", AnswerPiece()),
        (ANALYSIS + "<|start|>assistant<|end|>", AnswerPiece("", THOUGHT)),
        ("to=me, 🙂", AnswerPiece("to=me, 🙂")),
        ("to=me, 🙂<|return|>", AnswerPiece("to=me, 🙂")),
        ("<|channel|>analysis<|message|>cut of", AnswerPiece(reasoning="cut of")),
        ("", AnswerPiece()),
        (ANALYSIS + "after", AnswerPiece("after", THOUGHT)),
        ("<|channel|>" + 300 * "x", AnswerPiece(300 * "x")),
        ("<|channel|>final<|message|>a<|constrain|>b<|message|>c", AnswerPiece("abc")),
        ("<|channel|>analysis<|message|>a<|channel|>final<|message|>b", AnswerPiece("b", "a")),
    ],
)
def test_answers(text: str, expected: AnswerPiece) -> None:
    assert _parse(text) == expected


def test_stop_strings_cut_a_message() -> None:
    assert _parse(ANALYSIS + FINAL, stops=("= ",)) == AnswerPiece("2 + 2 ", THOUGHT)


@given(st.lists(st.sampled_from([*SPECIAL, "analysis", "final", " to=x", "assistant", "é"])))
def test_any_tokens_give_the_same_text_however_they_arrive(parts: list[str]) -> None:
    text = "".join(parts)
    assert _parse(text) == _parse(text, at_once=True)

"""Harmony's channels: the answer, the reasoning and tool calls, however the tokens arrive."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_trt.text.harmony import HarmonyFormat, HarmonyPiece
from tests.text.harmony import ANALYSIS, CALL, FINAL, SPECIAL, encode, make_harmony
from tests.text.tokenizers import make_byte_level

FORM = HarmonyFormat.find(make_harmony())


def _parse(text: str, *, stops: tuple[str, ...] = (), at_once: bool = False) -> HarmonyPiece:
    assert FORM is not None
    stream = FORM.open(stops)
    ids = encode(text)
    whole = HarmonyPiece()
    for piece in [ids] if at_once else [[token_id] for token_id in ids]:
        whole += stream.push(piece)
    return whole + stream.flush()


@pytest.mark.parametrize("at_once", [False, True])
def test_the_answer_and_the_reasoning_are_apart(at_once: bool) -> None:
    whole = _parse(ANALYSIS + FINAL, at_once=at_once)
    assert whole == HarmonyPiece("2 + 2 = 4 🙂.", "Simple: 2 + 2, é 🙂.")


def test_text_comes_as_its_tokens_do() -> None:
    assert FORM is not None
    stream = FORM.open()
    seen = [stream.push([token_id]) for token_id in encode(ANALYSIS + FINAL)]
    reasoning = [piece.reasoning for piece in seen if piece.reasoning]
    content = [piece.content for piece in seen if piece.content]
    assert reasoning[:3] == ["S", "i", "m"] and "🙂" in reasoning
    assert content[:3] == ["2", " ", "+"] and "🙂" in content


def test_a_tool_call_stays_as_the_text_it_is() -> None:
    whole = _parse(ANALYSIS + CALL)
    expected = CALL.removeprefix("<|start|>assistant")
    assert whole == HarmonyPiece(expected, "Simple: 2 + 2, é 🙂.")
    # The recipient may stand with the role too, also in the first message.
    first = ' to=functions.get<|channel|>commentary <|constrain|>json<|message|>{"a": 1}<|call|>'
    assert _parse(first) == HarmonyPiece(first)


def test_several_messages_a_channel() -> None:
    preamble = "<|start|>assistant<|channel|>commentary<|message|>I will look. <|end|>"
    assert _parse(ANALYSIS + preamble + ANALYSIS + FINAL) == HarmonyPiece(
        "I will look. 2 + 2 = 4 🙂.", 2 * "Simple: 2 + 2, é 🙂."
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain text, no header", HarmonyPiece("plain text, no header")),
        ("to be or not", HarmonyPiece("to be or not")),
        ("assistance", HarmonyPiece("assistance")),
        ("assistant is", HarmonyPiece("assistant is")),
        ("<|channel|>ana", HarmonyPiece()),
        (ANALYSIS + "<|start|>assistant<|end|>", HarmonyPiece("", "Simple: 2 + 2, é 🙂.")),
        ("to=me, 🙂", HarmonyPiece("to=me, 🙂")),
        ("to=me, 🙂<|return|>", HarmonyPiece("to=me, 🙂")),
        ("<|channel|>analysis<|message|>cut of", HarmonyPiece(reasoning="cut of")),
        ("", HarmonyPiece()),
        (ANALYSIS + "after", HarmonyPiece("after", "Simple: 2 + 2, é 🙂.")),
        ("<|channel|>" + 300 * "x", HarmonyPiece(300 * "x")),
        ("<|channel|>final<|message|>a<|constrain|>b<|message|>c", HarmonyPiece("abc")),
        ("<|channel|>analysis<|message|>a<|channel|>final<|message|>b", HarmonyPiece("b", "a")),
    ],
)
def test_answers_that_are_not_well_formed(text: str, expected: HarmonyPiece) -> None:
    assert _parse(text) == expected


def test_stop_strings_cut_a_message() -> None:
    assert _parse(ANALYSIS + FINAL, stops=("= ",)) == HarmonyPiece("2 + 2 ", "Simple: 2 + 2, é 🙂.")


@given(st.lists(st.sampled_from([*SPECIAL, "analysis", "final", " to=x", "assistant", "é"])))
def test_any_tokens_give_the_same_text_however_they_arrive(parts: list[str]) -> None:
    text = "".join(parts)
    assert _parse(text) == _parse(text, at_once=True)


def test_other_tokenizers_have_no_channels() -> None:
    assert HarmonyFormat.find(make_byte_level()) is None

"""Calls in an answer's text: what is one, what stays text, however the text arrives."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_trt.text.detokenise import AnswerPiece
from dflash_trt.text.tool_calls import HERMES, LLAMA_3, CallMarks, CallStream

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": [1, "}\\""], "b": {}}}\n</tool_call>'
ARGUMENTS = '{"a": [1, "}\\""], "b": {}}'
OTHER = '<tool_call>{"name":"get","arguments":{}}</tool_call>'
LLAMA = '{"name": "add", "parameters": {"a": 1}}'
Read = tuple[str, list[tuple[str, str]]]


def _read(text: str, marks: CallMarks = HERMES, size: int = 1) -> Read:
    """The content, and each call's name and arguments."""
    stream = CallStream(marks, ["add", "get"])
    whole = AnswerPiece()
    for at in range(0, len(text), size):
        whole += stream.push(text[at : at + size])
    whole += stream.flush()
    calls: list[tuple[str, str]] = []
    for piece in whole.calls:
        if piece.name is not None:
            assert piece.index == len(calls)
            calls.append((piece.name, ""))
        name, arguments = calls[piece.index]
        calls[piece.index] = (name, arguments + piece.arguments)
    return whole.content, calls


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (CALL, "", [("add", ARGUMENTS)]),
        (f"I add.\n\n{CALL}\n", "I add.", [("add", ARGUMENTS)]),
        (f"{CALL}\n{OTHER}", "", [("add", ARGUMENTS), ("get", "{}")]),
        (f"{CALL} and\n{OTHER} done ", " and done", [("add", ARGUMENTS), ("get", "{}")]),
        # Cut, or without what closes it.
        (CALL.removesuffix("</tool_call>"), "", [("add", ARGUMENTS)]),
        (CALL[: CALL.find(" [")], "", [("add", '{"a":')]),
        # Keys in another order come at once, at their end.
        (
            '<tool_call>{"arguments": {"é": 1}, "name": "get"}</tool_call>',
            "",
            [("get", '{"é": 1}')],
        ),
        ('<tool_call>{"arguments": {}, "name": "get"}', "", [("get", "{}")]),
        # What stays the text it is.
        ("no call <tool_cal", "no call <tool_cal", []),
        ("blanks stay  \n", "blanks stay  \n", []),
        (f"no {OTHER[:20]}", f"no {OTHER[:20]}", []),
        *(
            (f"so \n{bad} on", f"so \n{bad} on", [])
            for bad in (
                "<tool_call>{}</tool_call>",
                "<tool_call>add(1)</tool_call>",
                '<tool_call>{"name": "add", "arguments": 3}</tool_call>',
                '<tool_call>{"name": ["add"], "arguments": {}}</tool_call>',
                '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
                '<tool_call>{"name": "add" "arguments": {}}</tool_call>',
            )
        ),
        (f"<tool_call> <tool_call>{OTHER}", "<tool_call> <tool_call>", [("get", "{}")]),
        # After the arguments comes something else.
        ('<tool_call>{"name": "get", "arguments": {}, "x": 1}', ', "x": 1}', [("get", "{}")]),
    ],
)
def test_hermes(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    for size in (1, 7, 1000):
        assert _read(text, size=size) == (content, calls)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (LLAMA, "", [("add", '{"a": 1}')]),
        (f" \n{LLAMA}\n", "", [("add", '{"a": 1}')]),
        (f"<|python_tag|>{LLAMA}", "", [("add", '{"a": 1}')]),
        (f"Well. <|python_tag|>{LLAMA}", "Well.", [("add", '{"a": 1}')]),
        (f"{LLAMA}; {LLAMA}", "", [("add", '{"a": 1}')] * 2),
        (f"{LLAMA} so", " so", [("add", '{"a": 1}')]),
        ('{"type": "function", "name": "get", "parameters": {}}', "", [("get", "{}")]),
        ('{"answer": 42} ', '{"answer": 42} ', []),
        ('{"name": "Bob", "parameters": {}}', '{"name": "Bob", "parameters": {}}', []),
        ('{"type": "cat"} {', '{"type": "cat"} {', []),
        ("<|python_tag|>print(1)", "print(1)", []),
        (f"Text, then {LLAMA}", f"Text, then {LLAMA}", []),
        ("{", "{", []),
        ("", "", []),
    ],
)
def test_llama(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    for size in (1, 7, 1000):
        assert _read(text, LLAMA_3, size) == (content, calls)


def test_arguments_come_as_they_are_written() -> None:
    stream = CallStream(HERMES, ["add"])
    pieces = [stream.push(one) for one in ("<tool_call>", '{"name": "add", ', '"arguments": {"a"')]
    assert [piece.calls for piece in pieces[:2]] == [(), ()]
    assert [(one.name, one.arguments) for one in pieces[2].calls] == [("add", ""), (None, '{"a"')]
    (more,) = stream.push(": 1").calls
    assert (more.name, more.arguments) == (None, ": 1")
    answer = CallStream(LLAMA_3, ["add"]).push('{"an":')
    assert answer.content == '{"an":', "it need not wait"


_PARTS = ["<tool_call>", "</tool_call>", '{"name": "add", "arguments": ', '{"a": 1}', "}", "{", " "]
_PARTS += ["<|python_tag|>", '"', "\\", "é", "\n", LLAMA, OTHER]


@given(st.lists(st.sampled_from(_PARTS)), st.sampled_from([HERMES, LLAMA_3]))
def test_any_text_gives_the_same_however_it_arrives(parts: list[str], marks: CallMarks) -> None:
    text = "".join(parts)
    content, calls = _read(text, marks)
    assert (content, calls) == _read(text, marks, len(text) or 1) == _read(text, marks, 3)
    if not calls:
        assert content == (text if marks is HERMES else _without_marks(content, text))


def _without_marks(content: str, text: str) -> str:
    """A mark of Llama's is a token without text; blanks before one may go with it."""
    assert content.replace("<|python_tag|>", "") == text.replace("<|python_tag|>", "")
    return content

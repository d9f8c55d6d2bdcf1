"""Reasoning between a family's marks, token by token."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from dflash_trt.text.detokenise import AnswerPiece
from dflash_trt.text.grammar import Grammar, GrammarCompiler
from dflash_trt.text.harmony import HarmonyFormat
from dflash_trt.text.thoughts import GEMMA_4, QWEN, ThoughtFormat, find_format
from dflash_trt.text.tool_grammars import bind_answer
from tests.inspection import allows_all
from tests.text.tokenizers import ANALYSIS, CALL, FINAL, SPECIAL, encode, make_harmony, make_plain


def make_qwen() -> Tokenizer:
    """Qwen's marks are added tokens that have a text."""
    core = make_plain("<|im_end|>")
    core.add_tokens([AddedToken(one, special=False) for one in (QWEN.opening, QWEN.closing)])
    return core


def make_gemma() -> Tokenizer:
    return make_plain("<turn|>", GEMMA_4.opening, GEMMA_4.closing, *GEMMA_4.shown)


def find(core: Tokenizer) -> ThoughtFormat:
    form = find_format(core)
    assert isinstance(form, ThoughtFormat)
    return form


def read(
    core: Tokenizer, prompt: str, ids: list[int], size: int, *, bound: bool = False
) -> AnswerPiece:
    stream = find(core).open((), prompt, bound=bound)
    piece = AnswerPiece()
    for at in range(0, len(ids), size):
        piece += stream.push(ids[at : at + size])
    return piece + stream.flush()


USER = "<|im_start|>user\nIs </think> a tag?<|im_end|>\n<|im_start|>assistant\n"
TOOL = '<|tool_call>call:get{city:<|"|>Kyiv<|"|>}<tool_call|>'
CASES = [
    ("qwen", USER, "<think>\nHm é.\n\n</think>\n\nYes.", "Hm é.", "Yes."),
    ("qwen", USER + "<think>\n", "Hm.\n</think>\n\n Yes. ", "Hm.", "Yes. "),
    ("qwen", USER + "<think>\n\n</think>\n\n", " Yes, <think> too.\n", "", " Yes, <think> too.\n"),
    ("qwen", USER, "Yes, </think> and <think>.", "", "Yes, </think> and <think>."),
    ("qwen", USER + "<think>\n", "a\n\n b <think> c", "a\n\n b <think> c", ""),
    ("qwen", USER, " \n", "", " \n"),
    ("qwen", USER, "<think>\n\n</think>\n\n", "", ""),
    (
        "qwen",
        USER,
        "<think>a</think><tool_call>\n{}</tool_call>",
        "a",
        "<tool_call>\n{}</tool_call>",
    ),
    ("gemma", "<|turn>model\n", "<|channel>thought\nHm.\n<channel|>Yes.<turn|>", "Hm.", "Yes."),
    ("gemma", "<|turn>model\n", "<|channel>thought\n<channel|>Yes.", "", "Yes."),
    ("gemma", "<|turn>model\n<|channel>thought\n<channel|>", "thought", "", "thought"),
    ("gemma", "<|turn>model\n<|channel>thought\n", "thoughtful\n<channel|>", "thoughtful", ""),
    ("gemma", "<|turn>model\n", "<|channel>thought", "", ""),
    ("gemma", "<|turn>model\n", "<|channel>thoughtful\n<channel|>a", "thoughtful", "a"),
    ("gemma", "<|turn>model\n", "<|channel>thou", "thou", ""),
    ("gemma", "<|turn>model\n", f"Ok.<|channel>thought\nHm.<channel|>{TOOL}", "Hm.", f"Ok.{TOOL}"),
]


@pytest.mark.parametrize(("family", "prompt", "answer", "reasoning", "content"), CASES)
def test_reasoning_is_told_apart(
    family: str, prompt: str, answer: str, reasoning: str, content: str
) -> None:
    core = make_qwen() if family == "qwen" else make_gemma()
    for size in (1, 4, 400):
        piece = read(core, prompt, core.encode(answer).ids, size)
        assert (piece.reasoning, piece.content) == (reasoning, content), size
    # Of a prompt whose token ids are known, the last ones say the same.
    form = find(core)
    assert form.state_after(core.encode(prompt).ids) == form.state_after(prompt)


SCHEMA = Grammar("choice", '["yes", "no"]')


@pytest.mark.parametrize("make", [make_qwen, make_gemma])
def test_a_bound_answer_stands_behind_free_reasoning(make: object) -> None:
    core = make_qwen() if make is make_qwen else make_gemma()
    form, end = find(core), 256
    compiler = GrammarCompiler(core, core.get_vocab_size(), [end])
    opening, closing = form.marks.opening, form.marks.closing

    def follows(prompt: str, answer: str) -> bool:
        thought = form.grammar(prompt)
        bound = bind_answer(None, None, SCHEMA, harmony=False, thought=thought)
        assert bound is not None
        ids = core.encode(answer).ids
        return allows_all(compiler.compile(bound), [*ids, end])

    assert follows(f"x{opening}\n", f"Hm, no.\n{closing}\n\nyes")
    assert not follows(f"x{opening}\n", "yes")
    assert not follows(f"x{opening}\n", f"Hm.\n{closing}\n\nmaybe")
    assert follows("x", f"{opening}thought\nHm.\n{closing}\n\nno") and follows("x", "no")
    assert not follows("x", f"{opening}no")
    assert follows(f"x{opening}\n\n{closing}\n\n", "yes")
    assert not follows(f"x{opening}\n\n{closing}\n\n", f"{opening}{closing}yes")


@pytest.mark.parametrize("make", [make_qwen, make_gemma])
def test_bound_reasoning_ends_where_its_mark_is_spelled(make: Callable[[], Tokenizer]) -> None:
    """As the grammar reads it; tokens of several letters hold a mark's end and what follows."""
    core = make()
    form, marks = find(core), find(core).marks
    core.add_tokens([AddedToken(f"{marks.closing[-1]}\n", special=False, normalized=False)])
    answer = f"thoughtful {marks.closing[:-1]}{marks.closing}\n\nyes"
    for prompt, lead in ((f"x{marks.opening}\n", []), ("x", [form.opening])):
        bound = bind_answer(None, None, SCHEMA, harmony=False, thought=form.grammar(prompt))
        follower = GrammarCompiler(core, core.get_vocab_size(), [256]).compile(bound)
        pieces = (*answer.removesuffix(">\n\nyes"), ">\n", "\n", *"yes")
        ids = [*lead, *(at for one in pieces for at in core.encode(one).ids)]
        assert allows_all(follower, [*ids, 256])
        for size in (1, 4, 400):
            piece = read(core, prompt, ids, size, bound=True)
            assert piece == AnswerPiece("yes", answer.rpartition(marks.closing)[0])
            assert read(core, prompt, ids, size) == AnswerPiece("", answer), "only tokens mark it"


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


@given(st.lists(st.sampled_from([*SPECIAL, "analysis", "final", " to=x", "assistant", "é"])))
def test_any_tokens_give_the_same_text_however_they_arrive(parts: list[str]) -> None:
    text = "".join(parts)
    assert _parse(text) == _parse(text, at_once=True)

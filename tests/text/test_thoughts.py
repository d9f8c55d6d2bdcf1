"""Reasoning between a family's marks, token by token."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, Tokenizer

from dflash_trt.text.detokenise import AnswerPiece
from dflash_trt.text.grammar import Grammar, GrammarCompiler
from dflash_trt.text.thoughts import GEMMA_4, QWEN, ThoughtFormat, find_format
from dflash_trt.text.tool_grammars import bind_answer
from tests.inspection import allows_all
from tests.text.tokenizers import make_plain


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
    core: Tokenizer, prompt: str, answer: str, size: int, stops: tuple[str, ...] = ()
) -> AnswerPiece:
    ids = core.encode(answer).ids
    stream = find(core).open(stops, prompt)
    piece = AnswerPiece()
    for at in range(0, len(ids), size):
        piece += stream.push(ids[at : at + size])
    return piece + stream.flush()


USER = "<|im_start|>user\nIs </think> a tag?<|im_end|>\n<|im_start|>assistant\n"
CALL = '<|tool_call>call:get{city:<|"|>Kyiv<|"|>}<tool_call|>'
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
    ("gemma", "<|turn>model\n", f"Ok.<|channel>thought\nHm.<channel|>{CALL}", "Hm.", f"Ok.{CALL}"),
]


@pytest.mark.parametrize(("family", "prompt", "answer", "reasoning", "content"), CASES)
def test_reasoning_is_told_apart(
    family: str, prompt: str, answer: str, reasoning: str, content: str
) -> None:
    core = make_qwen() if family == "qwen" else make_gemma()
    for size in (1, 4, 400):
        piece = read(core, prompt, answer, size)
        assert (piece.reasoning, piece.content) == (reasoning, content), size
    # Of a prompt whose token ids are known, the last ones say the same.
    form = find(core)
    assert form.state_after(core.encode(prompt).ids) == form.state_after(prompt)


def test_a_part_ends_at_its_stop_string() -> None:
    piece = read(make_qwen(), USER, "<think>a b c</think>d b e", 1, ("b",))
    assert (piece.reasoning, piece.content) == ("a", "d ")


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

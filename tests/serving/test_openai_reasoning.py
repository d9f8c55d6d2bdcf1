"""Chats of models that mark reasoning, by channels or thoughts, as OpenAI's clients see them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from tokenizers import Tokenizer

from dflash_trt.text.grammar import GrammarCompiler
from tests.inspection import allows_all
from tests.serving.fronts import (
    ScriptedModel,
    openai_client,
    script_tokens,
    templated_front,
)
from tests.text.test_thoughts import make_qwen
from tests.text.tokenizers import ANALYSIS, FINAL, encode, make_harmony

CHANNELS = """\
{%- if reasoning_effort is not defined %}{% set reasoning_effort = "medium" %}{% endif -%}
<|start|>system<|message|>Reasoning: {{ reasoning_effort }}<|end|>
{%- for message in messages -%}
<|start|>{{ message.role }}{% if message.role == "assistant" %}<|channel|>final{% endif -%}
<|message|>{{ message.content }}<|end|>
{%- endfor -%}
<|start|>assistant"""
# What the published one of Qwen3.5 does at its end.
THOUGHTS = """\
{%- for one in messages -%}
<|im_start|>{{ one.role }}
{{ one.content }}<|im_end|>
{% endfor -%}
<|im_start|>assistant
<think>
{% if enable_thinking is defined and not enable_thinking %}

</think>

{% endif %}"""
CHAT: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "2 + 2?"}]}
OFF: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": False}}
REASONING = "Simple: 2 + 2, é 🙂."
Put = Callable[..., tuple[ScriptedModel, openai.OpenAI]]


def _putting(factory: pytest.TempPathFactory, template: str, core: Tokenizer) -> Iterator[Put]:
    """A model that answers with the tokens of a text, some at a time; and a client."""
    with templated_front(factory.mktemp("model"), template, core) as front:

        def answer_with(text: str, size: int = 3) -> tuple[ScriptedModel, openai.OpenAI]:
            model = script_tokens(core, text, size)
            return model, openai_client(front(model))

        yield answer_with


@pytest.fixture(scope="module")
def channels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Put]:
    yield from _putting(tmp_path_factory, CHANNELS, make_harmony())


@pytest.fixture(scope="module")
def thoughts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Put]:
    yield from _putting(tmp_path_factory, THOUGHTS, make_qwen())


def test_a_whole_answer(channels: Put) -> None:
    model, client = channels(ANALYSIS + FINAL)
    answer = client.chat.completions.create(**CHAT)
    message = answer.choices[0].message
    assert message.content == "2 + 2 = 4 🙂." and message.reasoning_content == REASONING
    expected = "<|start|>system<|message|>Reasoning: medium<|end|>"
    expected += "<|start|>user<|message|>2 + 2?<|end|><|start|>assistant"
    assert model.asked[0].prompt == expected
    assert not model.asked[0].add_special_tokens


def test_a_streamed_answer(channels: Put) -> None:
    _, client = channels(ANALYSIS + FINAL, 1)
    deltas = [
        chunk.choices[0].delta for chunk in client.chat.completions.create(**CHAT, stream=True)
    ]
    assert "".join(delta.content or "" for delta in deltas) == "2 + 2 = 4 🙂."
    shown = [getattr(delta, "reasoning_content", None) for delta in deltas]
    assert "".join(filter(None, shown)) == REASONING
    last = max(index for index, piece in enumerate(shown) if piece)
    assert all(not delta.content for delta in deltas[:last])


def test_effort_reaches_the_template_and_past_reasoning_does_not(channels: Put) -> None:
    model, client = channels(FINAL.removeprefix("<|start|>assistant"))
    messages = [
        *CHAT["messages"],
        {"role": "assistant", "content": "4", "reasoning_content": "easy"},
        {"role": "user", "content": "sure?"},
    ]
    answer = client.chat.completions.create(
        model="demo", messages=messages, reasoning_effort="high"
    )
    message = answer.choices[0].message
    assert (message.content, message.reasoning_content) == ("2 + 2 = 4 🙂.", None)
    prompt = model.asked[0].prompt
    assert "Reasoning: high" in prompt and "easy" not in prompt
    assert "<|start|>assistant<|channel|>final<|message|>4<|end|>" in prompt


def test_a_structured_answer_stands_in_the_final_message(channels: Put) -> None:
    model, client = channels(ANALYSIS + FINAL)
    asked: Any = {"model": "demo", "messages": [{"role": "user", "content": "x"}]}
    client.chat.completions.create(**asked, response_format={"type": "json_object"})
    core, grammar = make_harmony(), model.asked[-1].grammar
    assert grammar is not None
    end = core.token_to_id("<|return|>")
    follower = GrammarCompiler(core, core.get_vocab_size(), [end]).compile(grammar)
    answer = encode(ANALYSIS + FINAL.replace("2 + 2 = 4 🙂.", '{"a": 4}'))
    assert allows_all(follower, answer) and not allows_all(follower, encode(ANALYSIS + FINAL))
    with pytest.raises(openai.BadRequestError, match="rules of one's own do not go"):
        client.chat.completions.create(
            **asked, extra_body={"structured_outputs": {"grammar": 'root ::= "a"'}}
        )


def test_thinking_on_and_off(thoughts: Put) -> None:
    model, client = thoughts("Simple.\n</think>\n\n4.")
    message = client.chat.completions.create(**CHAT).choices[0].message
    assert (message.content, message.reasoning_content) == ("4.", "Simple.")
    assert model.asked[-1].prompt.endswith("assistant\n<think>\n")
    deltas = [one.choices[0].delta for one in client.chat.completions.create(**CHAT, stream=True)]
    assert "".join(one.content or "" for one in deltas) == "4."
    shown = [getattr(one, "reasoning_content", None) or "" for one in deltas]
    assert "".join(shown) == "Simple."
    message = client.chat.completions.create(**CHAT, extra_body=OFF).choices[0].message
    assert model.asked[-1].prompt.endswith("<think>\n\n</think>\n\n")
    # The prompt has closed the reasoning: what comes is the answer, whatever it holds.
    assert (message.content, message.reasoning_content) == ("Simple.\n</think>\n\n4.", None)


def test_a_bound_answer_stands_behind_the_reasoning(thoughts: Put) -> None:
    model, client = thoughts("Simple.\n</think>\n\n{}")
    bound: dict[str, Any] = {"response_format": {"type": "json_object"}}
    client.chat.completions.create(**CHAT, **bound)
    grammar = model.asked[-1].grammar
    assert grammar is not None and grammar.text.startswith("start: thought answer")
    client.chat.completions.create(**CHAT, **bound, extra_body=OFF)
    grammar = model.asked[-1].grammar
    assert grammar is not None and grammar.kind == "json_object"


def test_variables_that_mean_nothing(thoughts: Put) -> None:
    _, client = thoughts("x")
    for variables, what in (
        ({"enable_think": False}, "the chat template of demo has no such variable"),
        ({"messages": []}, "no variable that a request may fill"),
        ({"a b": 1}, "no variable that a request may fill"),
    ):
        with pytest.raises(openai.BadRequestError, match=what):
            client.chat.completions.create(**CHAT, extra_body={"chat_template_kwargs": variables})

"""Chats of a model with harmony's channels, as OpenAI's clients see them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest

from dflash_trt.text.grammar import GrammarCompiler
from tests.inspection import allows_all
from tests.serving.fronts import ScriptedModel, openai_client, switching_front
from tests.text.harmony import ANALYSIS, FINAL, encode, make_harmony

TEMPLATE = """\
{%- if reasoning_effort is not defined %}{% set reasoning_effort = "medium" %}{% endif -%}
<|start|>system<|message|>Reasoning: {{ reasoning_effort }}<|end|>
{%- for message in messages -%}
<|start|>{{ message.role }}{% if message.role == "assistant" %}<|channel|>final{% endif -%}
<|message|>{{ message.content }}<|end|>
{%- endfor -%}
<|start|>assistant"""
CHAT: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "2 + 2?"}]}
Put = Callable[..., tuple[ScriptedModel, openai.OpenAI]]
REASONING = "Simple: 2 + 2, é 🙂."


@pytest.fixture(scope="module")
def put(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Put]:
    """A model that answers with the tokens of a text, some at a time; and a client."""
    folder = tmp_path_factory.mktemp("harmony")
    core = make_harmony()
    core.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    with switching_front(folder) as front:

        def answer_with(text: str, size: int = 3) -> tuple[ScriptedModel, openai.OpenAI]:
            ids = encode(text)
            parts = tuple(tuple(ids[i : i + size]) for i in range(0, len(ids), size))
            # The text as a server sends it: special tokens have none, and headers look like words.
            pieces = tuple(core.decode(list(part), skip_special_tokens=True) for part in parts)
            model = ScriptedModel(pieces=pieces, token_ids=parts)
            return model, openai_client(front(model))

        yield answer_with


def test_a_whole_answer(put: Put) -> None:
    model, client = put(ANALYSIS + FINAL)
    answer = client.chat.completions.create(**CHAT)
    message = answer.choices[0].message
    assert message.content == "2 + 2 = 4 🙂." and message.reasoning_content == REASONING
    expected = "<|start|>system<|message|>Reasoning: medium<|end|>"
    expected += "<|start|>user<|message|>2 + 2?<|end|><|start|>assistant"
    assert model.asked[0].prompt == expected
    assert not model.asked[0].add_special_tokens


@pytest.mark.parametrize("size", [1, 3, 200])
def test_a_streamed_answer(put: Put, size: int) -> None:
    _, client = put(ANALYSIS + FINAL, size)
    deltas = [
        chunk.choices[0].delta for chunk in client.chat.completions.create(**CHAT, stream=True)
    ]
    assert "".join(delta.content or "" for delta in deltas) == "2 + 2 = 4 🙂."
    shown = [getattr(delta, "reasoning_content", None) for delta in deltas]
    assert "".join(filter(None, shown)) == REASONING
    last = max(index for index, piece in enumerate(shown) if piece)
    assert all(not delta.content for delta in deltas[:last])


def test_effort_reaches_the_template_and_past_reasoning_does_not(put: Put) -> None:
    model, client = put(FINAL.removeprefix("<|start|>assistant"))
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


def test_completions_stay_as_they_are(put: Put) -> None:
    model, client = put(ANALYSIS + FINAL)
    text = client.completions.create(model="demo", prompt="x").choices[0].text
    assert text == "".join(map(str, model.pieces))


def test_a_structured_answer_stands_in_the_final_message(put: Put) -> None:
    model, client = put(ANALYSIS + FINAL)
    asked: Any = {"model": "demo", "messages": [{"role": "user", "content": "x"}]}
    client.chat.completions.create(**asked, response_format={"type": "json_object"})
    core, grammar = make_harmony(), model.asked[-1].grammar
    assert grammar is not None
    end = core.token_to_id("<|return|>")
    follower = GrammarCompiler(core, core.get_vocab_size(), [end]).compile(grammar)
    answer = encode(ANALYSIS + FINAL.replace("2 + 2 = 4 🙂.", '{"a": 4}'))
    assert allows_all(follower, answer) and not allows_all(follower, encode(ANALYSIS + FINAL))
    with pytest.raises(openai.BadRequestError, match="rules of one's own do not go"):
        client.chat.completions.create(**asked, extra_body={"guided_grammar": 'root ::= "a"'})

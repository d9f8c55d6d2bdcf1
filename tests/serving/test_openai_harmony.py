"""Chats of a model with harmony's channels, as OpenAI's clients see them."""

from __future__ import annotations

import json
from collections.abc import Generator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.serving.fronts import ScriptedModel, Switch, running_front
from tests.text.harmony import ANALYSIS, CALL, FINAL, encode, make_harmony
from tests.waiting import PATIENCE_S

# What gpt-oss's own template leans on: macros, namespaces, tests for what is not defined, dates,
# JSON and refusals.
TEMPLATE = """\
{%- macro effort(level) -%}Reasoning: {{ level }}{%- endmacro -%}
{%- set state = namespace(system=false) -%}
{%- if reasoning_effort is not defined -%}{%- set reasoning_effort = "medium" -%}{%- endif -%}
<|start|>system<|message|>{% if strftime_now("%Y-%m-%d")|length != 10 %}{{ raise_exception("date") \
}}{% endif %}{{ effort(reasoning_effort) }}<|end|>
{%- for message in messages -%}
{%- if message.role == "system" -%}{{ raise_exception("no system: " + message|tojson) }}\
{%- endif -%}
<|start|>{{ message.role }}{% if message.role == "assistant" %}<|channel|>final{% endif -%}
<|message|>{{ message.content }}<|end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}
"""
CHAT: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "2 + 2?"}]}
REASONING = "Simple: 2 + 2, é 🙂."


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Generator[tuple[Switch, str], None, None]:
    folder: Path = tmp_path_factory.mktemp("harmony")
    make_harmony().save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    switch = Switch()
    with running_front(switch, folder) as url:
        yield switch, url


def _put(served: tuple[Switch, str], text: str, size: int = 3) -> tuple[ScriptedModel, Any]:
    """A model that answers with the tokens of `text`, some at a time; and a client."""
    switch, url = served
    ids = encode(text)
    parts = tuple(tuple(ids[i : i + size]) for i in range(0, len(ids), size))
    # The text as a server sends it: special tokens have none, and headers look like words.
    core = make_harmony()
    pieces = tuple(core.decode(list(part), skip_special_tokens=True) for part in parts)
    switch.model = ScriptedModel(pieces=pieces, token_ids=parts)
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S)
    return switch.model, client.chat.completions


def test_a_whole_answer(served: tuple[Switch, str]) -> None:
    model, chat = _put(served, ANALYSIS + FINAL)
    answer = chat.create(**CHAT)
    message = answer.choices[0].message
    assert message.content == "2 + 2 = 4 🙂." and message.reasoning_content == REASONING
    expected = "<|start|>system<|message|>Reasoning: medium<|end|>"
    expected += "<|start|>user<|message|>2 + 2?<|end|><|start|>assistant"
    assert model.asked[0].prompt == expected
    assert not model.asked[0].add_special_tokens


@pytest.mark.parametrize("size", [1, 3, 200])
def test_a_streamed_answer(served: tuple[Switch, str], size: int) -> None:
    _, chat = _put(served, ANALYSIS + FINAL, size)
    deltas = [chunk.choices[0].delta for chunk in chat.create(**CHAT, stream=True)]
    assert "".join(delta.content or "" for delta in deltas) == "2 + 2 = 4 🙂."
    shown = [getattr(delta, "reasoning_content", None) for delta in deltas]
    assert "".join(filter(None, shown)) == REASONING
    last = max(index for index, piece in enumerate(shown) if piece)
    assert all(not delta.content for delta in deltas[:last])


def test_a_tool_call_is_text(served: tuple[Switch, str]) -> None:
    _, chat = _put(served, ANALYSIS + CALL)
    message = chat.create(**CHAT).choices[0].message
    assert message.content == CALL.removeprefix("<|start|>assistant")
    assert message.tool_calls is None


def test_effort_reaches_the_template_and_past_reasoning_does_not(
    served: tuple[Switch, str],
) -> None:
    model, chat = _put(served, FINAL.removeprefix("<|start|>assistant"))
    messages = [
        *CHAT["messages"],
        {"role": "assistant", "content": "4", "reasoning_content": "easy"},
        {"role": "user", "content": "sure?"},
    ]
    answer = chat.create(model="demo", messages=messages, reasoning_effort="high")
    message = answer.choices[0].message
    assert (message.content, message.reasoning_content) == ("2 + 2 = 4 🙂.", None)
    prompt = model.asked[0].prompt
    assert "Reasoning: high" in prompt and "easy" not in prompt
    assert "<|start|>assistant<|channel|>final<|message|>4<|end|>" in prompt


def test_the_templates_own_refusal(served: tuple[Switch, str]) -> None:
    _, chat = _put(served, FINAL)
    message = {"role": "system", "content": "é"}
    with pytest.raises(openai.BadRequestError, match="no system") as caught:
        chat.create(model="demo", messages=[message])
    assert json.dumps(message, ensure_ascii=False) in str(caught.value.body)


def test_completions_stay_as_they_are(served: tuple[Switch, str]) -> None:
    switch, url = served
    _put(served, ANALYSIS + FINAL)
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S)
    text = client.completions.create(model="demo", prompt="x").choices[0].text
    assert text == "".join(map(str, switch.model.pieces))

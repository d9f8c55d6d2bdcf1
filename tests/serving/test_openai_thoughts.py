"""Chats of a model that reasons between marks, as OpenAI's clients see them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest

from tests.serving.fronts import ScriptedModel, openai_client, post, switching_front
from tests.text.test_thoughts import make_qwen

# What the published one of Qwen3.5 does at its end.
TEMPLATE = """\
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
Put = Callable[..., tuple[ScriptedModel, openai.OpenAI]]


@pytest.fixture(scope="module")
def put(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Put]:
    """A model that answers with the tokens of a text, and a client."""
    folder, core = tmp_path_factory.mktemp("thoughts"), make_qwen()
    core.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    with switching_front(folder) as front:

        def answer_with(text: str) -> tuple[ScriptedModel, openai.OpenAI]:
            ids = core.encode(text).ids
            parts = tuple(tuple(ids[at : at + 3]) for at in range(0, len(ids), 3))
            pieces = tuple(core.decode(list(part), skip_special_tokens=True) for part in parts)
            model = ScriptedModel(pieces=pieces, token_ids=parts)
            return model, openai_client(front(model))

        yield answer_with


def test_thinking_on_and_off(put: Put) -> None:
    model, client = put("Simple.\n</think>\n\n4.")
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


def test_an_answer_as_it_was_said(put: Put) -> None:
    _, client = put("Simple.\n</think>\n\n4.")
    raw = {"separate_reasoning": False}
    message = client.chat.completions.create(**CHAT, extra_body=raw).choices[0].message
    assert message.content == "Simple.\n</think>\n\n4."
    assert not hasattr(message, "reasoning_content")


def test_a_bound_answer_stands_behind_the_reasoning(put: Put) -> None:
    model, client = put("Simple.\n</think>\n\n{}")
    bound: dict[str, Any] = {"response_format": {"type": "json_object"}}
    client.chat.completions.create(**CHAT, **bound)
    grammar = model.asked[-1].grammar
    assert grammar is not None and grammar.text.startswith("start: thought answer")
    client.chat.completions.create(**CHAT, **bound, extra_body=OFF)
    grammar = model.asked[-1].grammar
    assert grammar is not None and grammar.kind == "json_object"


@pytest.mark.parametrize(
    ("variables", "what"),
    [
        ({"enable_think": False}, "the chat template of demo has no such variable"),
        ({"messages": []}, "no variable that a request may fill"),
        ({"bos_token": "x"}, "no variable that a request may fill"),
        ({"a b": 1}, "no variable that a request may fill"),
        ([], "must be an object"),
        ({"reasoning_effort": "high"}, "no such variable|no given effort"),
    ],
)
def test_variables_that_mean_nothing(put: Put, variables: Any, what: str) -> None:
    _, client = put("x")
    with pytest.raises(openai.BadRequestError, match=what):
        client.chat.completions.create(**CHAT, extra_body={"chat_template_kwargs": variables})


def test_tokens_of_a_chat_without_thinking(put: Put) -> None:
    _, client = put("x")
    url = str(client.base_url).removesuffix("/v1/")
    ids: dict[str, int] = {}
    for name, fields in (("on", {}), ("off", OFF)):
        status, body, _ = post(url, "/tokenize", CHAT | fields)
        assert status == 200
        ids[name] = json.loads(body)["count"]
    assert ids["off"] > ids["on"]

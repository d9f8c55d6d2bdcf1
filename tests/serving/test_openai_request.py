"""Bodies of OpenAI requests: what they mean, and every refusal by name."""

from __future__ import annotations

from typing import Any

import pytest

from dflash_trt.runtime import SamplingParams
from dflash_trt.serving.openai.errors import ApiError
from dflash_trt.serving.openai.request import read_chat, read_completion

HELLO = [{"role": "user", "content": "hello"}]


def _completion(**fields: Any) -> Any:
    return read_completion({"model": "demo", "prompt": "hello", **fields})


def _chat(**fields: Any) -> Any:
    return read_chat({"model": "demo", "messages": HELLO, **fields})


def test_defaults_are_openais() -> None:
    asked = _completion()
    assert (asked.prompt, asked.max_tokens, asked.stop_strings) == ("hello", 16, ())
    assert (asked.sampling.temperature, asked.sampling.top_p, asked.sampling.top_k) == (1, 1, None)
    assert not asked.stream and not asked.include_usage
    assert asked.sampling.seed != _completion().sampling.seed  # one of its own for each
    chat = _chat()
    assert (chat.max_tokens, chat.messages) == (None, tuple(HELLO))


def test_everything_that_is_supported() -> None:
    asked = _completion(
        prompt=["only one"],
        max_tokens=5,
        temperature=0.5,
        top_p=0.25,
        top_k=7,
        seed=2**64 - 1,
        stop=["a", "b", "c", "d"],
        stream=True,
        stream_options={"include_usage": True, "include_obfuscation": True},
        ignore_eos=True,
        user="u",
    )
    assert (asked.prompt, asked.max_tokens) == ("only one", 5)
    assert asked.sampling == SamplingParams(temperature=0.5, top_p=0.25, top_k=7, seed=2**64 - 1)
    assert asked.stop_strings == ("a", "b", "c", "d")
    assert asked.stream and asked.include_usage and asked.ignore_eos
    assert _completion(stop="a").stop_strings == ("a",)
    assert _chat(max_tokens=3).max_tokens == 3
    assert _chat(max_completion_tokens=3, max_tokens=3).max_tokens == 3


def test_messages() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    asked = _chat(
        messages=[
            {"role": "system", "content": "s"},
            {"role": "developer", "content": ""},
            {"role": "user", "content": parts},
            {"role": "assistant", "content": "x", "refusal": None, "tool_calls": []},
        ]
    )
    assert [message["content"] for message in asked.messages] == ["s", "", "ab", "x"]


NEUTRAL: dict[str, Any] = {
    "n": 1,
    "frequency_penalty": 0,
    "presence_penalty": 0.0,
    "logit_bias": {},
    "service_tier": "auto",
}


def test_neutral_values_ask_for_nothing() -> None:
    _completion(**NEUTRAL, best_of=1, echo=False, suffix="")
    _chat(
        **NEUTRAL,
        tools=[],
        tool_choice="auto",
        parallel_tool_calls=True,
        logprobs=False,
        top_logprobs=0,
        response_format={"type": "text"},
        modalities=["text"],
        store=False,
    )
    # null is as good as absent, whatever the name.
    names = ("temperature", "max_tokens", "stop", "seed", "stream", "logprobs", "whatever")
    _completion(**dict.fromkeys(names))
    _chat(**dict.fromkeys(names))


@pytest.mark.parametrize(
    ("fields", "param", "piece"),
    [
        ({"model": 3}, "model", "name of a model"),
        ({"n": 2}, "n", "2 is not supported"),
        ({"n": True}, "n", "not supported"),
        ({"frequency_penalty": 0.5}, "frequency_penalty", "0.5"),
        ({"presence_penalty": -1}, "presence_penalty", "-1"),
        ({"logit_bias": {"50256": -100}}, "logit_bias", "not supported"),
        ({"frobnicate": 1}, "frobnicate", "not supported"),
        ({'a"\n\x1b[31m': 1}, None, "not supported"),
        ({"temperature": -1}, "temperature", "-1"),
        ({"temperature": "warm"}, "temperature", "number"),
        ({"temperature": True}, "temperature", "number"),
        ({"temperature": 10**400}, "temperature", "large"),
        ({"top_p": 0}, "top_p", "above 0"),
        ({"top_p": 1.5}, "top_p", "1.5"),
        ({"top_k": 0}, "top_k", "at least 1"),
        ({"top_k": 1.5}, "top_k", "integer"),
        ({"seed": -1}, "seed", "2^64"),
        ({"seed": 2**64}, "seed", "2^64"),
        ({"seed": 1.5}, "seed", "integer"),
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"max_tokens": 1.0}, "max_tokens", "integer"),
        ({"max_tokens": True}, "max_tokens", "integer"),
        ({"stop": ["a"] * 5}, "stop", "at most 4"),
        ({"stop": [""]}, "stop", "empty"),
        ({"stop": 3}, "stop", "text"),
        ({"stop": 0}, "stop", "text"),
        ({"stop": False}, "stop", "text"),
        ({"stop": [3]}, "stop", "text"),
        ({"stop": "\ud800"}, "stop", "not Unicode"),
        ({"stream": 1}, "stream", "true or false"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream: true"),
        ({"stream": True, "stream_options": []}, "stream_options", "object"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "not supported"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "include_usage", "true or"),
    ],
)
def test_refused_in_both(fields: dict[str, Any], param: str | None, piece: str) -> None:
    for read in (_completion, _chat):
        with pytest.raises(ApiError) as caught:
            read(**fields)
        assert piece in caught.value.message and caught.value.message.isprintable()
        assert param is None or caught.value.param == param
        assert caught.value.status == 400


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [1, 2]}, "prompt"),
        ({"prompt": [[1, 2]]}, "prompt"),
        ({"prompt": "\udcff"}, "prompt"),
        ({"echo": True}, "echo"),
        ({"logprobs": 0}, "logprobs"),
        ({"logprobs": 5}, "logprobs"),
        ({"best_of": 3}, "best_of"),
        ({"suffix": "end"}, "suffix"),
        ({"messages": HELLO}, "messages"),
        ({"max_completion_tokens": 3}, "max_completion_tokens"),
    ],
)
def test_refused_completions(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        _completion(**fields)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": ["hello"]}, "messages[0]"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role"),
        ({"messages": [*HELLO, {"role": "assistant"}]}, "messages[1].content"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "x", "name": "n"}]}, "messages[0].name"),
        (
            {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]},
            "messages[0].tool_calls",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0]",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": 3}]}]},
            "messages[0].content[0].text",
        ),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"functions": [{}]}, "functions"),
        ({"logprobs": True}, "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"reasoning_effort": "minimal"}, "reasoning_effort"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        ({"prompt": "x"}, "prompt"),
    ],
)
def test_refused_chats(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        _chat(**fields)
    assert caught.value.param == param


@pytest.mark.parametrize("body", [None, [], "text", 3])
def test_a_body_is_an_object(body: Any) -> None:
    for read in (read_completion, read_chat):
        with pytest.raises(ApiError, match="JSON object"):
            read(body)

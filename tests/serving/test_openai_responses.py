"""OpenAI's /v1/responses as its own package reads it, before a model that follows a script."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from dflash_trt.serving.client.errors import ServedModelError
from dflash_trt.serving.openai import large
from dflash_trt.serving.openai.responses_request import read_response
from tests.serving.fronts import (
    Front,
    ScriptedModel,
    openai_client,
    post,
    script_tokens,
    templated_front,
)
from tests.serving.test_openai_answers import HERMES, KNOWS, SCHEMA
from tests.text.test_thoughts import make_qwen

CORE = make_qwen()
TOOLS: Any = [
    {"type": "function", "name": "get", "parameters": SCHEMA, "strict": True},
    {"type": "function", "name": "put", "description": "puts"},
]
OPENING = ["created", "in_progress"]
MESSAGE = ["output_item.added", "content_part.added", "output_text.delta"]
MESSAGE_END = ["output_text.done", "content_part.done", "output_item.done"]
REASONING = [one.replace("output_text", "reasoning_text") for one in (*MESSAGE, *MESSAGE_END)]
CALL = [f"function_call_arguments.{one}" for one in ("delta", "done")]
CALL = ["output_item.added", *CALL, "output_item.done"]


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    folder = tmp_path_factory.mktemp("responses") / "model"
    with templated_front(folder, KNOWS.replace("FORM", "<tool_call>"), CORE) as front:
        yield front


def _script(text: str, **how: Any) -> ScriptedModel:
    return script_tokens(CORE, text, **{"reason": "stop", **how})


def _events(url: str, **fields: Any) -> list[dict[str, Any]]:
    """A stream's events, each of which the package's own type of that name takes."""
    status, content, _ = post(url, "/v1/responses", {"model": "demo", "stream": True, **fields})
    assert status == 200, content
    events = []
    for number, block in enumerate(content.decode().split("\n\n")[:-1]):
        named, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert named == f"event: {event['type']}" and event["sequence_number"] == number
        told: Any = TypeAdapter[Any](ResponseStreamEvent).validate_python(event)
        assert told.type == event["type"]
        events.append(event)
    return events


def _kinds(events: list[dict[str, Any]]) -> list[str]:
    """Types of events, of which the same one several times after each other counts once."""
    kinds = [one["type"].removeprefix("response.") for one in events]
    return [kind for at, kind in enumerate(kinds) if kind != (kinds[at - 1] if at else "")]


def _said(response: Any) -> list[Any]:
    """What a response says, without ids."""
    items = response["output"] if isinstance(response, dict) else response.to_dict()["output"]
    return [{key: one[key] for key in one if key not in ("id", "call_id")} for one in items]


@pytest.mark.parametrize("small", [1000, -1])
def test_text(front: Front, monkeypatch: pytest.MonkeyPatch, small: int) -> None:
    """Written in the event loop, and as large ones are beside it."""
    monkeypatch.setattr(large, "_SMALL_VALUES", small)
    model = ScriptedModel(reason="stop", cached=5)
    url, asked = front(model), {"input": "count", "instructions": "Be brief."}
    whole = openai_client(url).responses.create(model="demo", **asked)
    TypeAdapter(Response).validate_python(whole.to_dict())
    assert (whole.output_text, whole.status, whole.store) == ("one two", "completed", False)
    assert model.asked[0].prompt == "<system>Be brief.<user>count"
    usage = whole.usage
    assert usage is not None and usage.input_tokens_details.cached_tokens == 5
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (7, 10, 17)
    assert usage.output_tokens_details.reasoning_tokens == 0
    events = _events(url, **asked)
    assert _kinds(events) == [*OPENING, *MESSAGE, *MESSAGE_END, "completed"]
    assert [one["delta"] for one in events if "delta" in one] == ["one ", "two"]
    assert {one["item_id"] for one in events if "item_id" in one} == {
        events[-1]["response"]["output"][0]["id"]
    }
    assert _said(events[-1]["response"]) == _said(whole)
    assert events[-1]["response"]["usage"] == whole.to_dict()["usage"]
    with openai_client(url).responses.stream(model="demo", input="count") as stream:
        assert stream.get_final_response().output_text == "one two"


def test_reasoning_and_calls_there_and_back(front: Front) -> None:
    """Items come back as a client keeps them, and are the chat that they are of."""
    model = _script(f"<think>\nHm.\n</think>\n\n{HERMES}")
    url, asked = front(model), {"input": "both?", "tools": TOOLS}
    whole = openai_client(url).responses.create(model="demo", **asked)
    reasoning, _, get, put = whole.output
    assert reasoning.type == "reasoning" and reasoning.content is not None
    assert (reasoning.content[0].text, whole.output_text) == ("Hm.", "I look.")
    assert get.type == put.type == "function_call"
    assert [(one.name, json.loads(one.arguments)) for one in (get, put)] == [
        ("get", {"a": 1}),
        ("put", {"b": "}"}),
    ]
    events = _events(url, **asked)
    wanted = [*OPENING, *REASONING, *MESSAGE, *MESSAGE_END, *CALL, *CALL, "completed"]
    assert _kinds(events) == wanted and _said(events[-1]["response"]) == _said(whole)
    assert [one["output_index"] for one in events if one["type"].endswith("added")] == [
        *(0, 0, 1, 1, 2, 3)
    ]
    model.pieces, model.token_ids = ["done"], ()
    history: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "both?"}]}]
    history += [one.to_dict() for one in whole.output]
    for call in (put, get):
        assert call.type == "function_call"
        output: Any = {"type": "function_call_output", "output": f"of {call.name}"}
        history.append(output | {"call_id": call.call_id})
    done = openai_client(url).responses.create(model="demo", input=history, tools=TOOLS)
    prompt = model.asked[-1].prompt
    assert done.output_text == "done" and isinstance(prompt, str)
    assert '<tools>{"type": "function", "function": {"name": "get"' in prompt
    assert '<user>both?<assistant>I look.<tool_call>get {"a": 1}<tool_call>put {' in prompt
    assert prompt.index(f"<tool>of put(put {put.call_id})") < prompt.index("<tool>of get(get ")


def test_an_answer_that_is_cut(front: Front) -> None:
    for text, kind in (("<think>\nHm", "reasoning"), ("I look", "message"), (HERMES[:50], "call")):
        url = front(_script(text, reason="length"))
        asked = {"input": "both?", "tools": TOOLS, "max_output_tokens": 9}
        whole = openai_client(url).responses.create(model="demo", **asked)
        assert whole.status == "incomplete" and whole.incomplete_details is not None
        assert whole.incomplete_details.reason == "max_output_tokens"
        last = whole.to_dict()["output"][-1]
        assert last["status"] == "incomplete" and kind in last["type"]
        events = _events(url, **asked)
        assert events[-1]["type"] == "response.incomplete"
        assert _said(events[-1]["response"]) == _said(whole)


def test_structured_output(front: Front) -> None:
    class Answer(BaseModel):
        a: int

    model = _script('{"a": 1}')
    url = front(model)
    client = openai_client(url).responses
    parsed = client.parse(model="demo", input="a?", text_format=Answer)
    assert parsed.output_parsed == Answer(a=1)
    assert model.asked[-1].grammar is not None and '"a"' in model.asked[-1].grammar.text
    client.create(model="demo", input="a?", text={"format": {"type": "json_object"}})
    assert model.asked[-1].grammar is not None and '"a"' not in model.asked[-1].grammar.text
    schema = {"type": "object", "contains": {"type": "null"}}
    relaxed = {"format": {"type": "json_schema", "name": "x", "schema": schema}}
    told = _events(url, input="a?", text=relaxed)[-1]["response"]
    assert told["warnings"][0].startswith("text.format.schema: ")
    assert told["text"]["format"] == relaxed["format"]


def test_an_error_in_the_middle_of_a_response(front: Front) -> None:
    url = front(ScriptedModel(["one ", ServedModelError("the executor failed", "failed")]))
    events = _events(url, input="count")
    assert _kinds(events) == [*OPENING, *MESSAGE, "failed"]
    error = events[-1]["response"]["error"]
    assert error == {"code": "server_error", "message": "the executor failed"}


def _strict(keyword: str) -> dict[str, Any]:
    schema = {"type": "object", keyword: {"type": "null"}}
    return {"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}}


CALLED = {"type": "function_call", "call_id": "c", "name": "get", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "d", "output": "1"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"store": True}, "store"),
        ({"model": "other"}, "model"),
        ({"nonsense": 1}, "nonsense"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": 5}]}, "input[0].content"),
        ({"instructions": "a", "input": [{"role": "king", "content": ""}]}, "input[0].role"),
        ({"input": [CALLED | {"name": ""}]}, "input[0].name"),
        ({"input": [CALLED | {"type": "function_call_output"}]}, "input[0].output"),
        ({"input": [RESULT]}, "input[0].call_id"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"truncation": "auto"}, "truncation"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": _strict("contains")}, "text.format.schema"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "x"}}, "tool_choice"),
    ],
)
def test_refusals(front: Front, fields: dict[str, Any], param: str) -> None:
    model = ScriptedModel()
    body = {"model": "demo", "input": "count", **fields}
    status, answer, _ = post(front(model), "/v1/responses", body)
    error = json.loads(answer)["error"]
    assert (status, error["param"]) == (404 if param == "model" else 400, param), error
    assert error["type"] == "invalid_request_error" and not model.asked


def test_fields_are_a_chats() -> None:
    asked = read_response(
        {
            "model": "demo",
            "input": "a",
            "store": False,
            "background": False,
            "temperature": 0.5,
            "top_p": 0.25,
            "seed": 3,
            "speculate": False,
            "stream": True,
            "user": "u",
            "max_output_tokens": 7,
            "parallel_tool_calls": False,
            "top_logprobs": 2,
            "tools": TOOLS,
            "tool_choice": {"type": "function", "name": "put"},
            "include": ["message.output_text.logprobs", "reasoning.encrypted_content"],
            "reasoning": {"summary": "auto"},
            "stream_options": {"include_obfuscation": False},
            "text": {"verbosity": "medium"},
            "metadata": {"a": "b"},
            "truncation": "disabled",
        }
    )
    generation, use = asked.chat.generation, asked.chat.chat and asked.chat.chat.tools
    sampling = generation.sampling
    assert (sampling.temperature, sampling.top_p, sampling.seed) == (0.5, 0.25, 3)
    assert (generation.max_tokens, generation.logprobs, generation.streaming) == (7, 2, True)
    assert not generation.speculate
    assert use is not None and (use.only, use.must, use.parallel) == ("put", True, False)
    told = {"metadata": {"a": "b"}, "temperature": 0.5, "store": False, "max_output_tokens": 7}
    assert {key: asked.about[key] for key in told} == told

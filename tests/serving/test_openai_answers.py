"""Chats with tools, as OpenAI's client sees them, before a model that follows a script."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from pydantic import BaseModel
from tokenizers import Tokenizer

from dflash_trt.text.grammar import GrammarCompiler
from tests.inspection import allows_all
from tests.serving.fronts import (
    ScriptedModel,
    openai_client,
    post,
    script_tokens,
    templated_front,
)
from tests.text.test_thoughts import make_qwen
from tests.text.tokenizers import ANALYSIS, CALL, FINAL, encode, make_harmony, make_plain

KNOWS = """\
{% if tools %}<tools>{% for t in tools %}{{ t | tojson }}{% endfor %}</tools>{% endif -%}
{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}
FORM{{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}
{%- if m.role == 'tool' %}({{ m.name }} {{ m.tool_call_id }}){% endif %}{% endfor %}"""
PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "get", "parameters": SCHEMA, "strict": True}},
    {"type": "function", "function": {"name": "put", "description": "puts"}},
]
ASK: Any = [{"role": "user", "content": "both?"}]
CHAT: dict[str, Any] = {"model": "demo", "messages": ASK, "tools": TOOLS}
HERMES = (
    'I look.\n<tool_call>\n{"name": "get", "arguments": {"a": 1}}\n</tool_call>\n'
    '<tool_call>\n{"name": "put", "arguments": {"b": "}"}}\n</tool_call>'
)
LLAMA = '<|python_tag|>{"name": "get", "parameters": {"a": 1}}'


def _script(core: Tokenizer, text: str) -> ScriptedModel:
    return script_tokens(core, text, reason="stop")


def _stream(client: openai.OpenAI, **fields: Any) -> tuple[str, list[dict[str, str]], str | None]:
    """Content, calls and the reason of a streamed answer, put together as clients do."""
    content, calls, reason = "", [], None
    for chunk in client.chat.completions.create(**CHAT | fields, stream=True):
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        for piece in choice.delta.tool_calls or []:
            if piece.id is not None:
                assert (piece.index, piece.type) == (len(calls), "function")
                calls.append({"id": piece.id, "name": piece.function.name, "arguments": ""})
            else:
                assert piece.function.name is None
            calls[piece.index]["arguments"] += piece.function.arguments
        reason = choice.finish_reason or reason
    return content, calls, reason


HERMES_CORE, LLAMA_CORE = make_plain("<end>"), make_plain("<end>", "<|python_tag|>")
FAMILIES = [
    pytest.param(KNOWS.replace("FORM", "<tool_call>"), HERMES_CORE, HERMES, id="hermes"),
    pytest.param(PLAIN, HERMES_CORE, HERMES, id="in words"),
    pytest.param(KNOWS.replace("FORM", '"parameters":'), LLAMA_CORE, LLAMA, id="llama"),
    pytest.param(KNOWS, make_harmony(), ANALYSIS + CALL.replace("Tokyo", "é"), id="harmony"),
]


@pytest.mark.parametrize(("template", "core", "text"), FAMILIES)
def test_calls_whole_and_streamed(
    tmp_path: Path, template: str, core: Tokenizer, text: str
) -> None:
    with templated_front(tmp_path / "model", template, core) as front:
        model = _script(core, text)
        client = openai_client(front(model))
        choice = client.chat.completions.create(**CHAT).choices[0]
        assert choice.finish_reason == "tool_calls"
        calls = choice.message.tool_calls
        assert calls is not None and all(one.id.startswith("call_") for one in calls)
        got = [(one.function.name, json.loads(one.function.arguments)) for one in calls]
        wanted: list[Any] = [("get", {"a": 1}), ("put", {"b": "}"})]
        if "channel" in text:
            wanted = [("get", {"location": "é"})]
        assert got == (wanted if "I look." in text or "channel" in text else wanted[:1])
        assert choice.message.content == ("I look." if "I look." in text else None)
        content, streamed, reason = _stream(client)
        assert (content or None, reason) == (choice.message.content, "tool_calls")
        whole = [(one.function.name, one.function.arguments) for one in calls]
        assert [(one["name"], one["arguments"]) for one in streamed] == whole
        assert len({one["id"] for one in streamed}) == len(streamed)
        # Without tools, and where none may be called, the same tokens are text.
        for fields in ({"tools": []}, {"tool_choice": "none"}):
            message = client.chat.completions.create(**CHAT | fields).choices[0].message
            assert message.tool_calls is None and "get" in (message.content or "")
        assert model.asked[-1].grammar is None
        if template == PLAIN:
            assert '"name": "put"' in model.asked[0].prompt
        else:
            assert '<tools>{"type": "function", "function": {"name": "get"' in model.asked[0].prompt
        assert "put" not in model.asked[-1].prompt
        # Results go back into the template.
        messages = list(ASK)
        for turn in range(2):
            choice = client.chat.completions.create(**CHAT | {"messages": messages}).choices[0]
            calls = choice.message.tool_calls or []
            messages.append(choice.message.model_dump(exclude_none=True))
            for one in calls:
                result = {"role": "tool", "tool_call_id": one.id, "content": f"result {turn}"}
                messages.append(result)
        model.pieces, model.token_ids = ["done"], ()
        done = client.chat.completions.create(**CHAT | {"messages": messages}).choices[0]
        prompt = model.asked[-1].prompt
        assert isinstance(prompt, str) and done.message.content == "done"
        assert prompt.index("result 0") < prompt.index("result 1")
        if template == PLAIN:
            assert prompt.count("<tool_response>\nresult 1\n</tool_response>") == len(calls)
        else:
            assert f"<tool>result 1(get {calls[0].id})" in prompt
            assert '"get": ' not in prompt and "get {" in prompt, "arguments are an object"


@pytest.mark.parametrize(("template", "core", "text"), FAMILIES)
def test_an_answer_that_is_cut_comes_back(
    tmp_path: Path, template: str, core: Tokenizer, text: str
) -> None:
    """Wherever that is: marked, streamed as it is whole, and with results or without."""
    with templated_front(tmp_path / "model", template, core) as front:
        whole = script_tokens(core, text, 1)
        for count in range(1, len(whole.pieces), 13):
            model = ScriptedModel(whole.pieces[:count], whole.token_ids[:count])
            client = openai_client(front(model))
            choice = client.chat.completions.create(**CHAT).choices[0]
            calls = choice.message.tool_calls or []
            content, streamed, reason = _stream(client)
            assert (content, reason) == (choice.message.content or "", "length")
            assert [one["arguments"] for one in streamed] == [
                one.function.arguments for one in calls
            ]
            results = [{"role": "tool", "tool_call_id": one.id, "content": "x"} for one in calls]
            for rest in ([], ASK, [*results, *ASK]):
                messages = [*ASK, choice.message.model_dump(exclude_none=True), *rest]
                client.chat.completions.create(**CHAT | {"messages": messages})


def _grammar_allows(model: ScriptedModel, core: Tokenizer, text: str) -> bool:
    """Whether an answer may be this text and end, by the grammar of the newest request."""
    grammar = model.asked[-1].grammar
    assert grammar is not None
    end = core.token_to_id("<end>") or core.token_to_id("<|return|>")
    follower = GrammarCompiler(core, core.get_vocab_size(), [end]).compile(grammar)
    ids = [*core.encode(text, add_special_tokens=False).ids, end]
    return allows_all(follower, ids)


def test_what_is_left_out_of_schemas_is_told(tmp_path: Path) -> None:
    lax = {"type": "array", "items": {"type": "string", "format": "x"}, "uniqueItems": True}
    holder = {**SCHEMA, "properties": {"a": lax}}
    fits = '{"a": ["b","b"]}'
    call = f'<tool_call>\n{{"name": "put", "arguments": {fits}}}\n</tool_call>'
    told = '"uniqueItems" at /properties/a/uniqueItems is not enforced'

    def tool(strict: bool) -> dict[str, Any]:
        function = {"name": "put", "parameters": holder, "strict": strict}
        return {"tools": [TOOLS[0], {"type": "function", "function": function}]}

    def form(**fields: Any) -> dict[str, Any]:
        wrapped = {"name": "x", "schema": holder, **fields}
        return {"tools": [], "response_format": {"type": "json_schema", "json_schema": wrapped}}

    guide = {"tools": [], "extra_body": {"structured_outputs": {"json": json.dumps(holder)}}}
    must = {"tool_choice": "required"}
    cases: list[tuple[dict[str, Any], str | None, str]] = [
        (form(), "response_format.json_schema.schema", fits),
        (guide, "structured_outputs.json", fits),
        (tool(False) | must, "tools[1].function.parameters", call),
        (tool(False), None, ""),  # free to call or not, nothing of it is bound
    ]
    with templated_front(tmp_path, KNOWS.replace("FORM", "<tool_call>"), HERMES_CORE) as front:
        model = _script(HERMES_CORE, "x")
        client = openai_client(front(model)).chat.completions
        for fields, where, answer in cases:
            warnings = None if where is None else [f"{where}: {told}"]
            whole = client.create(**CHAT | fields)
            assert getattr(whole, "warnings", None) == warnings
            *_, last = client.create(**CHAT | fields, stream=True)
            assert last.choices and getattr(last, "warnings", None) == warnings
            assert where is None or _grammar_allows(model, HERMES_CORE, answer)
        for strict, where in (
            (form(strict=True), "response_format.json_schema.schema"),
            (tool(True), "tools[1].function.parameters"),
        ):
            with pytest.raises(openai.BadRequestError) as refused:
                client.create(**CHAT | strict)
            assert refused.value.param == where and told in refused.value.message


def test_what_binds_an_answer(tmp_path: Path) -> None:
    wrong, free = HERMES.replace('"a": 1', '"a": "x"'), "just text"
    lone = HERMES[HERMES.index("<tool_call>") : HERMES.index("</tool_call>")] + "</tool_call>"
    other = lone.replace("get", "put").replace('"a"', '"b"')
    named = {"type": "function", "function": {"name": "put"}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    both = {"parallel_tool_calls": False}
    cases: list[tuple[dict[str, Any], dict[str, bool]]] = [
        ({}, {HERMES: True, free: True, wrong: False}),
        (both, {lone: True, HERMES: False}),
        ({"tool_choice": "required"}, {lone: True, free: False, wrong: False}),
        ({"tool_choice": named}, {lone: False, other: True}),
        ({"response_format": form}, {lone: True, '{"a": 3}': True, free: False, wrong: False}),
    ]
    template = KNOWS.replace("FORM", "<tool_call>")
    with templated_front(tmp_path / "model", template, HERMES_CORE) as front:
        model = _script(HERMES_CORE, HERMES)
        client = openai_client(front(model)).chat.completions
        for fields, said in cases:
            client.create(**CHAT | fields)
            for text, fits in said.items():
                assert _grammar_allows(model, HERMES_CORE, text) == fits, (fields, text)
        client.create(**CHAT | {"tools": TOOLS[1:]})
        assert model.asked[-1].grammar is None, "nothing strict, nothing bound"


class Get(BaseModel):
    """What the parse helper reads."""

    a: int


def test_parse_helpers(tmp_path: Path) -> None:
    with templated_front(tmp_path / "model", PLAIN, HERMES_CORE) as front:
        model = _script(HERMES_CORE, '{"a": 5}')
        client = openai_client(front(model)).chat.completions
        parsed = client.parse(model="demo", messages=ASK, response_format=Get)
        assert parsed.choices[0].message.parsed == Get(a=5)
        assert _grammar_allows(model, HERMES_CORE, '{"a":7}')
        assert not _grammar_allows(model, HERMES_CORE, '{"a":7,"b":1}')
        lone = HERMES[: HERMES.index("</tool_call>") + 12]
        client = openai_client(front(_script(HERMES_CORE, lone))).chat.completions
        tool = openai.pydantic_function_tool(Get, name="get")
        answer = client.parse(model="demo", messages=ASK, tools=[tool]).choices[0]
        (call,) = answer.message.tool_calls or []
        assert call.function.parsed_arguments == Get(a=1)


def test_calls_in_a_form_that_is_not_known(tmp_path: Path) -> None:
    template = KNOWS.replace("FORM", "<tool_call><function=")
    with templated_front(tmp_path / "model", template, HERMES_CORE) as front:
        url = front(ScriptedModel())
        status, answer, _ = post(url, "/v1/chat/completions", CHAT)
        assert status == 400 and b"calls in no form that is known here" in answer
        assert post(url, "/v1/chat/completions", {**CHAT, "tools": []})[0] == 200


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
QUESTION: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "2 + 2?"}]}
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


def _say(client: openai.OpenAI, **fields: Any) -> tuple[str | None, str | None]:
    """Content and reasoning of an answer, which must be the same whole and streamed."""
    asked = client.chat.completions
    whole = asked.create(**QUESTION | fields)
    message, details = whole.choices[0].message, whole.usage.completion_tokens_details
    assert bool(details.reasoning_tokens) == bool(getattr(message, "reasoning_content", None))
    deltas = [one.choices[0].delta for one in asked.create(**QUESTION | fields, stream=True)]
    shown = [getattr(one, "reasoning_content", None) or "" for one in deltas]
    assert "".join(one.content or "" for one in deltas) == message.content
    assert "".join(shown) == (message.reasoning_content or "")
    last = max((index for index, piece in enumerate(shown) if piece), default=0)
    assert not any(one.content for one in deltas[:last])
    return message.content, message.reasoning_content


@pytest.mark.parametrize("size", [1, 3])
def test_channels(channels: Put, size: int) -> None:
    model, client = channels(ANALYSIS + FINAL, size)
    assert _say(client) == ("2 + 2 = 4 🙂.", REASONING)
    expected = "<|start|>system<|message|>Reasoning: medium<|end|>"
    expected += "<|start|>user<|message|>2 + 2?<|end|><|start|>assistant"
    assert model.asked[0].prompt == expected and not model.asked[0].add_special_tokens


def test_effort_reaches_the_template_and_past_reasoning_does_not(channels: Put) -> None:
    model, client = channels(FINAL.removeprefix("<|start|>assistant"))
    messages = [
        *QUESTION["messages"],
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
    assert _say(client) == ("4.", "Simple.")
    assert model.asked[-1].prompt.endswith("assistant\n<think>\n")
    # The prompt has closed the reasoning: what comes is the answer, whatever it holds.
    assert _say(client, extra_body=OFF) == ("Simple.\n</think>\n\n4.", None)
    assert model.asked[-1].prompt.endswith("<think>\n\n</think>\n\n")


def test_a_bound_answer_stands_behind_the_reasoning(thoughts: Put) -> None:
    model, client = thoughts("Simple.\n</think>\n\n{}")
    bound: dict[str, Any] = {"response_format": {"type": "json_object"}}
    client.chat.completions.create(**QUESTION, **bound)
    grammar = model.asked[-1].grammar
    assert grammar is not None and grammar.text.startswith("start: thought answer")
    client.chat.completions.create(**QUESTION, **bound, extra_body=OFF)
    grammar = model.asked[-1].grammar
    assert grammar is not None and grammar.kind == "json_object"


def test_variables_that_mean_nothing(thoughts: Put) -> None:
    _, client = thoughts("x")
    for name in ("enable_think", "messages", "a b"):
        given = {"chat_template_kwargs": {name: 1}}
        with pytest.raises(openai.BadRequestError, match="is no variable of demo's chat template"):
            client.chat.completions.create(**QUESTION, extra_body=given)

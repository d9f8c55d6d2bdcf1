"""Chats of a model with harmony's channels, as OpenAI's clients see them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

import dflash_trt
from dflash_trt.runtime import Penalties, SamplingParams
from dflash_trt.serving.server.tritonserver import TritonServerBinary
from dflash_trt.text import harmony
from dflash_trt.text.grammar import GrammarCompiler
from dflash_trt.text.tool_grammars import bind_answer
from dflash_trt.text.tools import Tool, ToolFormat, ToolUse
from tests.inspection import allows_all
from tests.serving.fronts import ScriptedModel, openai_client, switching_front
from tests.serving.served import DEMO_FOLDERS, build_demo, serving
from tests.text.harmony import ANALYSIS, FINAL, SPECIAL, encode, make_harmony

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


LOADS = {"type": "array", "items": {"type": "integer", "minimum": 10, "maximum": 99}}
SCHEMA = {
    "type": "object",
    "properties": {"loads": {**LOADS, "minItems": 24, "maxItems": 24}},
    "required": ["loads"],
    "additionalProperties": False,
}
TOOLS_TEMPLATE = """\
{%- for one in tools or [] -%}
<|start|>developer<|message|>{{ one.function.name }}<|end|>
{%- endfor -%}
{%- for one in messages -%}
{%- for call in one.tool_calls or [] -%}
<|start|>assistant to=functions.{{ call.function.name }}<|channel|>commentary json<|message|>
{{- call.function.arguments | tojson }}<|call|>
{%- endfor -%}
{%- if one.role == "tool" -%}<|start|>functions.{{ one.name }} to=assistant<|message|>
{{- one.content }}<|end|>
{%- elif one.content -%}<|start|>{{ one.role }}<|message|>{{ one.content }}<|end|>{%- endif -%}
{%- endfor -%}
<|start|>assistant"""


def _build_gpt_oss(folder: Path) -> Path:
    """The small gpt-oss pair, of whose tokens the last ones are harmony's."""
    core = json.loads((DEMO_FOLDERS["demo-gpt-oss"] / "target" / "tokenizer.json").read_text())
    names, model, plain = SPECIAL[:-1], core["model"], core["added_tokens"]
    kept = len(model["vocab"]) - len(names)
    vocab = {text: at for text, at in model["vocab"].items() if at < kept}
    model = {**model, "vocab": vocab, "merges": model["merges"][: -len(names)]}
    more = [{**plain[0], "id": kept + at, "content": name} for at, name in enumerate(names)]
    ends = [kept + names.index(one) for one in (harmony.RETURN, harmony.CALL)]
    changes: dict[str, dict[str, Any]] = {
        "target/tokenizer.json": {"model": model, "added_tokens": [*plain, *more]},
        "target/tokenizer_config.json": {"chat_template": TOOLS_TEMPLATE},
        "target/generation_config.json": {"eos_token_id": ends},
    }
    return build_demo(folder, changes, name="demo-gpt-oss")


@pytest.mark.exhaustive
def test_calls_of_a_served_pair(tritonserver: TritonServerBinary, tmp_path: Path) -> None:
    """They are read from the stream as it comes, and are what this process decodes by itself."""
    bundle = _build_gpt_oss(tmp_path)
    tool = {"type": "function", "function": {"name": "run", "parameters": SCHEMA, "strict": True}}
    ask: list[Any] = [{"role": "user", "content": "fleet in kyiv"}]
    prompt = "<|start|>developer<|message|>run<|end|><|start|>user<|message|>fleet in kyiv<|end|>"
    use = ToolUse((Tool("run", parameters=SCHEMA, strict=True),), must=True)
    with dflash_trt.load(bundle) as pair, serving(bundle, bundle) as served:
        core = pair.tokenizer.core
        form = ToolFormat.find(TOOLS_TEMPLATE, core, harmony=True)
        bound = bind_answer(form, use, None, harmony=True)
        channels = pair.answer_format
        assert isinstance(channels, harmony.HarmonyFormat) and bound is not None
        # Of what may come first it neither thinks nor writes a preamble.
        unwanted = [at for text, at in core.get_vocab().items() if "analysis".startswith(text)]
        bias = dict.fromkeys([*unwanted, core.token_to_id(harmony.MESSAGE)], -100.0)
        client = openai_client(served.openai.removesuffix("/v1"))
        model = client.models.list().data[0].id
        for temperature in (0.0, 1.0):
            request = pair.request(
                f"{prompt}<|start|>assistant",
                SamplingParams(temperature=temperature, seed=7),
                max_tokens=300,
                penalties=Penalties(bias=tuple(bias.items())),
                grammar=pair.grammars.compile(bound),
            )
            (own,) = pair.run([request])
            stream = channels.open((), ["run"])
            calls = (stream.push(own.token_ids) + stream.flush()).calls
            expected = "".join(one.arguments for one in calls)
            fields: dict[str, Any] = {"model": model, "messages": ask, "tools": [tool], "seed": 7}
            fields |= {"max_tokens": 300, "temperature": temperature, "logit_bias": bias}
            fields |= {"tool_choice": "required"}
            choice = client.chat.completions.create(**fields).choices[0]
            (call,) = choice.message.tool_calls or []
            assert (call.function.name, call.function.arguments) == ("run", expected)
            assert choice.finish_reason == "tool_calls" and choice.message.content is None
            loads = json.loads(expected)["loads"]
            assert len(loads) == 24 and all(10 <= one <= 99 for one in loads)
            pieces = [
                piece
                for chunk in client.chat.completions.create(**fields, stream=True)
                for piece in chunk.choices[0].delta.tool_calls or []
            ]
            assert pieces[0].function.name == "run" and pieces[0].id is not None
            assert all(one.id is one.function.name is None for one in pieces[1:])
            assert "".join(one.function.arguments or "" for one in pieces) == expected
            assert len(pieces) > 4, "as it comes, not at its end"
        result = {"role": "tool", "tool_call_id": call.id, "content": "3 done"}
        answered = [*ask, choice.message.model_dump(exclude_none=True), result]
        again = client.chat.completions.create(**fields | {"messages": answered})
        assert again.choices[0].finish_reason == "tool_calls"

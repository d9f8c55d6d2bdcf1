"""Bodies of OpenAI requests: what they mean, and every refusal by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dflash_trt.bundle.sampling_defaults import SamplingDefaults
from dflash_trt.decoding import SamplingParams
from dflash_trt.serving.client.client import GenerationRequest
from dflash_trt.serving.openai.chat_request import read_chat, read_completion
from dflash_trt.serving.openai.errors import ApiError
from dflash_trt.text.grammar import Grammar
from dflash_trt.text.tools import Tool, ToolUse

HELLO = [{"role": "user", "content": "hello"}]


def _completion(**fields: Any) -> Any:
    return read_completion({"model": "demo", "prompt": "hello", **fields})


def _chat(**fields: Any) -> Any:
    return read_chat({"model": "demo", "messages": HELLO, **fields})


def test_defaults_are_openais() -> None:
    asked, chat = _completion(), _chat()
    seed = asked.generation.sampling.seed
    sampling = SamplingParams(temperature=1, top_p=1, seed=seed)
    expected = GenerationRequest(
        prompt="hello", max_tokens=16, sampling=sampling, streaming=False, add_special_tokens=True
    )
    assert asked.generation == expected and not asked.include_usage
    assert seed != _completion().generation.sampling.seed  # one of its own for each
    assert (chat.generation.max_tokens, chat.chat.messages) == (None, tuple(HELLO))


STATED = "temperature top_k top_p min_p repetition_penalty".split()
QWEN = dict(zip([*STATED, "max_new_tokens"], (0.6, 20, 0.95, 0.1, 1.05, 2048), strict=True))
ALL: SamplingDefaults = {"top_k": 0, "temperature": 0}


@pytest.mark.parametrize(
    ("defaults", "asked", "chosen", "most"),
    [
        (QWEN, {}, (0.6, 20, 0.95, 0.1, 1.05), 2048),
        (QWEN, dict.fromkeys(STATED), (0.6, 20, 0.95, 0.1, 1.05), 2048),  # null is absent
        (QWEN, {"temperature": 0, "max_tokens": 7}, (0, 20, 0.95, 0.1, 1.05), 7),
        (QWEN, {"temperature": 1, "top_k": -1}, (1, None, 0.95, 0.1, 1.05), 2048),
        (QWEN, {"top_k": 0, "top_p": 1, "min_p": 0}, (0.6, None, 1, 0, 1.05), 2048),
        (QWEN, {"repetition_penalty": 1, "top_k": 3}, (0.6, 3, 0.95, 0.1, 1), 2048),
        (ALL, {}, (0, None, 1, 0, 1), None),
        (ALL, {"temperature": 2}, (2, None, 1, 0, 1), None),
    ],
)
def test_a_checkpoints_defaults(
    defaults: SamplingDefaults, asked: dict[str, Any], chosen: tuple[float, ...], most: int | None
) -> None:
    """They stand where a request states nothing; a completion's length is OpenAI's."""
    chat = {"model": "demo", "messages": HELLO}
    completion = read_completion({"model": "demo", "prompt": "hello", **asked}, defaults)
    for read in (completion, read_chat({**chat, **asked}, defaults)):
        given, repetition = read.generation.sampling, read.generation.penalties.repetition
        assert (*(getattr(given, one) for one in STATED[:4]), repetition) == chosen
    assert completion.generation.max_tokens == asked.get("max_tokens", 16)
    assert read.generation.max_tokens == most
    assert read_chat({**chat, "max_completion_tokens": 5}, defaults).generation.max_tokens == 5


def test_everything_that_is_supported() -> None:
    asked = _completion(
        prompt=["only one"],
        max_tokens=5,
        temperature=0.5,
        top_p=0.25,
        top_k=7,
        seed=2**64 - 1,
        stop=["a", "b", "c", "d"],
        stop_token_ids=[7, 2],
        stream=True,
        stream_options={"include_usage": True, "include_obfuscation": True},
        ignore_eos=True,
        min_tokens=0,
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        user="u",
    )
    assert asked.include_usage
    assert asked.generation == GenerationRequest(
        prompt="only one",
        max_tokens=5,
        sampling=SamplingParams(temperature=0.5, top_p=0.25, top_k=7, seed=2**64 - 1),
        stop_strings=("a", "b", "c", "d"),
        stop_token_ids=(7, 2),
        ignore_eos=True,
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        streaming=True,
    )
    assert _completion(stop="a").generation.stop_strings == ("a",)
    assert not _completion(add_special_tokens=False).generation.add_special_tokens
    assert _completion(min_tokens=3).generation.min_tokens == 3
    assert _completion(logprobs=20).generation.logprobs == 20
    assert _completion(max_tokens=0, echo=True).generation.max_tokens == 1
    for seed, kept in ((-(2**63), 2**63), (-2, 2**64 - 2), (2**63, 2**63)):
        assert _completion(seed=seed).generation.sampling.seed == kept
    assert len({_completion(seed=-1).generation.sampling.seed for _ in range(2)}) == 2
    assert _chat(max_tokens=3).generation.max_tokens == 3
    assert _chat(max_completion_tokens=3, max_tokens=3).generation.max_tokens == 3


def test_prompts_and_samples() -> None:
    assert _completion(prompt=[5, 6]).prompts == ((5, 6),)
    asked = _completion(prompt=["a", [5, 6]], n=3, seed=2**64 - 2)
    got = [(one.prompt, one.sampling.seed) for one in asked.outputs()]
    seeds = [2**64 - 2, 2**64 - 1, 0]
    assert got == [(prompt, seed) for prompt in ("a", (5, 6)) for seed in seeds]
    assert len({one.flow for one in asked.outputs()}) == 1, "they take turns as one"
    assert [one.prompt for one in _chat(n=2).outputs()] == ["", ""]
    with pytest.raises(ApiError, match="9 prompts of 8 outputs are more than 64"):
        _completion(prompt=["a"] * 9, n=8)


def test_messages() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    asked = _chat(
        messages=[
            {"role": "system", "content": "s"},
            {"role": "developer", "content": ""},
            {"role": "user", "content": parts},
            {"role": "assistant", "content": "x", "parsed": {"a": 1}, "tool_calls": []},
            {"type": "message", "role": "user", "name": "ana", "content": "y", "audio": None},
            {"role": "assistant", "content": None, "name": "bot", "annotations": [{"url": "u"}]},
        ]
    )
    read = asked.chat.messages
    assert [one["content"] for one in read] == ["s", "", "ab", "x", "y", ""]
    assert [one.get("name") for one in read[3:]] == [None, "ana", "bot"]
    assert not any({"type", "annotations", "parsed"} & one.keys() for one in read)


def test_neutral_values_ask_for_nothing() -> None:
    neutral: dict[str, Any] = {"logit_bias": {}, "service_tier": "auto"}
    neutral |= {"frequency_penalty": 0, "presence_penalty": 0.0, "priority": 0}
    neutral |= {"length_penalty": 1.0, "spaces_between_special_tokens": True, "detokenize": True}
    neutral |= {"use_beam_search": False, "lora_path": "", "documents": [], "vllm_xargs": {}}
    neutral |= {"mirostat": 0, "xtc_probability": 0.0, "best_of": 2, "n": 2}
    _completion(**neutral, suffix="")
    _chat(
        **neutral,
        tools=[],
        tool_choice="auto",
        parallel_tool_calls=True,
        logprobs=False,
        top_logprobs=0,
        response_format={"type": "text"},
        modalities=["text"],
        store=False,
        include_reasoning=True,
        verbosity="medium",
        stream_options={"include_usage": False},
    )
    # null is as good as absent, whatever the name.
    names = ("temperature", "max_tokens", "stop", "seed", "stream", "logprobs", "whatever")
    _completion(**dict.fromkeys(names))
    _chat(**dict.fromkeys(names))


GUIDES = "structured_outputs"
BOTH: list[tuple[dict[str, Any], str | None, str]] = [
    ({"model": 3}, "model", "a text"),
    ({"n": 0}, "n", "equal to 1"),
    ({"n": 10**6}, "n", "1,000,000 outputs are more than 64"),
    ({"frequency_penalty": 2.5}, "frequency_penalty", "2.5 is not a number from -2 to 2"),
    ({"presence_penalty": "1"}, "presence_penalty", "number"),
    ({"repetition_penalty": 0}, "repetition_penalty", "0.0 is not a number from 0.0001"),
    ({"logit_bias": {"50256": -101}}, "logit_bias", "-101.0 is not a number from -100 to 100"),
    ({"logit_bias": {"5.0": 1}}, "logit_bias.5.0", "match pattern"),
    ({"logit_bias": {"5": 1, "05": 2}}, "logit_bias", "names a token twice"),
    ({"logit_bias": dict.fromkeys(map(str, range(1025)), 1)}, "logit_bias", "1024"),
    ({"allowed_token_ids": []}, "allowed_token_ids", "names 0 tokens"),
    ({"bad_words": [""]}, "bad_words[0]", "empty"),
    ({"logprobs_mode": "raw"}, "logprobs_mode", "raw_logprobs"),
    ({"frobnicate": 1, "n": 0}, "frobnicate", "not supported"),
    ({'a"\n\x1b[31m': 1}, None, "not supported"),
    ({"temperature": -1}, "temperature", "-1"),
    ({"temperature": "warm"}, "temperature", 'a number, not "warm"'),
    ({"temperature": 10**400}, "temperature", "number"),
    ({"top_p": 0}, "top_p", "above 0"),
    ({"top_k": -2}, "top_k", "at least 1"),
    ({"min_p": 1.5}, "min_p", "from 0 (keeps all) to 1"),
    ({"seed": 2**64}, "seed", "2^64"),
    ({"max_tokens": 0}, "max_tokens", "at least 1"),
    ({"max_tokens": True}, "max_tokens", "integer"),
    ({"stop": ["a"] * 65}, "stop", "65 stop strings are more than 64"),
    ({"seed": -(2**63) - 1}, "seed", "2^64"),
    ({"min_tokens": -1}, "min_tokens", "at least 0"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens", "9 is more than max_tokens, 8"),
    ({"min_tokens": 9, "stop": "a"}, "min_tokens", "does not go with stop strings"),
    ({"priority": 1}, "priority", "0, not 1"),
    ({"request_id": "a b"}, "request_id", "match pattern"),
    ({"length_penalty": 0.5}, "length_penalty", "1, not 0.5"),
    ({"best_of": 3, "n": 2}, "best_of", "must be n, 2, not 3"),
    ({"stop": ["a" * 2000] * 3}, "stop", "6,000 characters of stop strings are more than 4,096"),
    ({"stop": [""]}, "stop[0]", "empty"),
    ({"stop": "\ud800"}, "stop", "not Unicode"),
    ({"stop_token_ids": [3] * 257}, "stop_token_ids", "257 stop tokens are more than 256"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids[0]", "integer"),
    ({"stream": 1}, "stream", "true or false"),
    ({"prompt_logprobs": 21}, "prompt_logprobs", "0 to 20"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream: true"),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "not supported"),
    (
        {"response_format": {"type": "json_object"}, GUIDES: {"regex": "a"}},
        "structured_outputs.regex",
        "does not go with response_format",
    ),
    ({GUIDES: {"regex": "a", "json": {}}}, "structured_outputs.regex", "with"),
    ({GUIDES: {"backend": "x"}}, "structured_outputs.backend", "not supported"),
    ({GUIDES: ["a"]}, GUIDES, "an object"),
    ({GUIDES: {"choice": []}}, "structured_outputs.choice", "at least one"),
    ({GUIDES: {"json": ""}}, "structured_outputs.json", "empty"),
    ({GUIDES: {"grammar": "x" * 65537}}, "structured_outputs.grammar", "65,537 characters"),
]


def _refuse(read: Callable[..., object], fields: dict[str, Any]) -> ApiError:
    with pytest.raises(ApiError) as caught:
        read(**fields)
    assert caught.value.status == 400 and caught.value.message.isprintable()
    return caught.value


@pytest.mark.parametrize(("fields", "param", "piece"), BOTH)
def test_refused_in_both(fields: dict[str, Any], param: str | None, piece: str) -> None:
    for read in (_completion, _chat):
        error = _refuse(read, fields)
        assert error.code or error.param not in ("n", "frobnicate")
        assert piece in error.message and (param is None or error.param == param)


def _function(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **fields}}


COMPLETIONS: dict[str, list[dict[str, Any]]] = {
    "prompt": [{"prompt": one} for one in (None, "", [], {}, ["a"] * 65)],
    "prompt[0]": [{"prompt": [True]}],
    "prompt[1]": [{"prompt": one} for one in ([[1], []], ["a", ""])],
    "prompt[0][1]": [{"prompt": [[1, -1]]}],
    "logprobs": [{"logprobs": 21}],
    "suffix": [{"suffix": "end"}],
    "messages": [{"messages": HELLO}],
}
CHATS: dict[str, list[dict[str, Any]]] = {
    "messages": [{"messages": []}],
    "tool_choice": [{"tool_choice": one} for one in ("required", "any", _function(), [])],
    "functions": [{"functions": [{}]}],
    "top_logprobs": [{"top_logprobs": one} for one in (3, 21)],
    "response_format.type": [{"response_format": {"type": "xml"}}],
    "response_format.x": [{"response_format": {"type": "json_object", "x": 1}}],
    "modalities[0]": [{"modalities": ["audio"]}],
    "reasoning_effort": [{"reasoning_effort": "minimal"}],
    "prompt": [{"prompt": "x"}],
    "max_tokens": [{"max_tokens": 3, "max_completion_tokens": 4}],
    "tools": [{"tools": [_function(name=f"f{at}") for at in range(129)]}],
    "add_generation_prompt": [{"continue_final_message": True, "add_generation_prompt": True}],
    "tools[1].function.name": [{"tools": [_function(), _function()]}],
}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
MESSAGES: list[tuple[Any, str]] = [
    ("hello", ""),
    ({"role": "function", "content": "x"}, ".role"),
    ({"role": "tool", "content": "x", "tool_call_id": "c"}, ".tool_call_id"),
    ({"role": "user", "content": "x", "tool_calls": [{}]}, ".tool_calls"),
    ({"role": "user", "content": None}, ".content"),
    ({"role": "user", "content": "\ud800"}, ".content"),
    ({"role": "assistant", "tool_calls": [CALL, CALL]}, ".tool_calls[1].id"),
    ({"role": "user", "content": [{"type": "image_url"}]}, ".content[0].type"),
]
IN_CALL = "messages[1].tool_calls[0]"
CALLS: list[tuple[Any, str]] = [
    ({"id": "c"}, ".function"),
    ({"type": "custom", "id": "c"}, ".type"),
    *(
        ({"id": "c", "function": {"name": "f", "arguments": one}}, ".function.arguments")
        for one in (3, {})
    ),
]
TOOLS: list[tuple[Any, str]] = [
    ({"type": "custom", "custom": {"name": "f"}}, ".type"),
    (_function(name="a b"), ".function.name"),
    (_function(x=1), ".function.x"),
    (_function(parameters={"type": "string"}), ".function.parameters"),
]
SCHEMAS: list[tuple[Any, str]] = [
    ({"name": "a"}, ".schema"),
    ({"schema": {"enum": ["x" * 70000]}}, ".schema"),
]


def _ask(message: Any) -> dict[str, Any]:
    return {"messages": [*HELLO, message]}


def _bind(wrapped: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": wrapped}}


@pytest.mark.parametrize(
    ("read", "fields", "param"),
    [
        *((_completion, one, param) for param, each in COMPLETIONS.items() for one in each),
        *((_chat, one, param) for param, each in CHATS.items() for one in each),
        *((_chat, _ask(one), f"messages[1]{at}") for one, at in MESSAGES),
        *(
            (_chat, _ask({"role": "assistant", "tool_calls": [call]}), f"{IN_CALL}{at}")
            for call, at in CALLS
        ),
        *((_chat, {"tools": [one]}, f"tools[0]{at}") for one, at in TOOLS),
        *((_chat, _bind(one), f"response_format.json_schema{at}") for one, at in SCHEMAS),
    ],
)
def test_refused_in_one(read: Callable[..., object], fields: dict[str, Any], param: str) -> None:
    assert _refuse(read, fields).param == param


def test_calls_and_their_results() -> None:
    asks = {"role": "assistant", "content": None, "tool_calls": [CALL, {**CALL, "id": "d"}]}
    results = [{"role": "tool", "content": one, "tool_call_id": one} for one in "dc"]
    read = _chat(messages=[*HELLO, asks, *results, *HELLO]).chat.messages
    called = {"name": "f", "arguments": {"a": 1}}
    assert read[1]["content"] == "" and read[1]["tool_calls"][1]["function"] == called
    assert read[1]["tool_calls"][1]["id"] == "d"
    assert read[2] == {"role": "tool", "content": "d", "tool_call_id": "d", "name": "f"}
    for messages, param in (
        ([asks, *results, results[0]], "messages[3].tool_call_id"),
        ([asks, *HELLO, *results], "messages[2].tool_call_id"),
        ([*results], "messages[0].tool_call_id"),
    ):
        assert _refuse(_chat, {"messages": messages}).param == param


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ('{"city": "Par', {"city": "Par"}),
        ('{"a": [1, {"b": tr', {"a": [1, {}]}),
        ("{", {}),
        ('{"a": 1 "b"}', {"a": 1}),
        ("no JSON", {"arguments": "no JSON"}),
        ("[1]", {"arguments": "[1]"}),
        ('{"a": 1}', {"a": 1}),
    ],
)
def test_a_call_that_was_cut_comes_back(arguments: str, shown: dict[str, Any]) -> None:
    """With its result or without, whatever the model wrote; and one that is whole."""
    cut = {**CALL, "function": {"name": "f", "arguments": arguments}}
    asks = {"role": "assistant", "content": None, "tool_calls": [cut]}
    result = {"role": "tool", "content": "no JSON", "tool_call_id": "c", "name": "f"}
    for rest in ([], [result], HELLO, [result, *HELLO]):
        read = _chat(messages=[*HELLO, asks, *rest]).chat.messages
        assert read[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": shown}
        assert len(read) == 2 + len(rest)


def test_tools() -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "integer"}}}
    full = _function(description="does", parameters=parameters, strict=True)
    other = {"type": "function", "function": {"name": "g"}}
    use = _chat(tools=[full, other], parallel_tool_calls=False).chat.tools
    assert use == ToolUse((Tool("f", "does", parameters, True), Tool("g")), parallel=False)
    assert _chat(tools=[full], tool_choice="required").chat.tools.must
    named = {"type": "function", "function": {"name": "g"}}
    use = _chat(tools=[full, other], tool_choice=named).chat.tools
    assert [one.name for one in use.callable] == ["g"] and use.must and not use.parallel
    assert _chat(tools=[full], tool_choice="none").chat.tools is None
    assert _chat(tools=[], tool_choice="none").chat.tools is None


def test_what_binds_an_answer() -> None:
    schema = {"type": "object"}
    wanted: list[tuple[dict[str, Any], Grammar]] = [
        ({"json": schema}, Grammar("json_schema", '{"type":"object"}')),
        ({"json": '{"type": "object"}'}, Grammar("json_schema", '{"type": "object"}')),
        ({"json": False}, Grammar("json_schema", "false")),  # which is refused when it compiles
        ({"json_object": True}, Grammar("json_object")),
        ({"regex": "a+"}, Grammar("regex", "a+")),
        ({"choice": ["a", "b"], "json": None}, Grammar("choice", '["a", "b"]')),
        ({"grammar": 'root ::= "a"'}, Grammar("grammar", 'root ::= "a"')),
    ]
    for read in (_completion, _chat):
        for guides, grammar in wanted:
            assert read(structured_outputs=guides).generation.grammar == grammar
        nothing = {"structured_outputs": {"json_object": False}}
        assert read(**nothing, response_format={"type": "text"}).generation.grammar is None

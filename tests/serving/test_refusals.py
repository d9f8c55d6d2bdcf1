"""What cannot be served is refused in one clear line, and the server serves on."""

from __future__ import annotations

import math
from typing import Any

import pytest

from dflash_trt.serving.server.launcher import ServerAddresses
from tests.serving.conftest import counting
from tests.serving.served import CLASSIC, LLM, StreamClient, ask_grpc, post

MAX = "sampling_param_max_tokens"

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (LLM, {MAX: 0}, f"{MAX}: 0 is not an integer of at least 1"),
    (LLM, {"sampling_param_temperature": math.nan}, "sampling_param_temperature: nan is not"),
    (LLM, {"sampling_param_top_p": 1.5}, "sampling_param_top_p: 1.5 is not"),
    (LLM, {"sampling_param_top_k": -1}, "sampling_param_top_k: -1 is not"),
    (LLM, {"text_input": b"abc\xff"}, "text_input: is not UTF-8 at byte 3"),
    (LLM, {"text_input": ""}, "text_input: the prompt is empty"),
    (LLM, {"text_input": ["a", "b"]}, "text_input: holds 2 texts"),
    (LLM, {"sampling_param_stop": [b"\xc3("]}, "sampling_param_stop: is not UTF-8 at byte 0"),
    (LLM, {"sampling_param_stop": ["zq"] * 65}, "sampling_param_stop: 65 values are more than 64"),
    (LLM, {"sampling_param_stop": "x" * 4097}, "sampling_param_stop: 4,097 characters of stop str"),
    (LLM, {"text_input": "1 " * 9000}, "do not fit: the context of 16384"),
    (LLM, {"text_input": "x" * (1 << 20)}, "1,048,576 characters do not fit"),
    (
        LLM,
        {"sampling_param_frequency_penalty": 2.5},
        "sampling_param_frequency_penalty: 2.5 is not a number from -2 to 2",
    ),
    (LLM, {"image_url": "http://x/y.png"}, 'image_url: "http://x/y.png" is not supported'),
    (LLM, {"lora_id": 7}, "lora_id: 7 is not supported; leave it out"),
    (CLASSIC, {"beam_width": 4}, "beam_width: 4 is not supported; leave it out or pass 1"),
    (CLASSIC, {"bad_words": [""] * 65}, "bad_words: 65 values are more than 64"),
    (CLASSIC, {"stop_words": ["zq"] * 65}, "stop_words: 65 values are more than 64"),
    (CLASSIC, {"min_tokens": 5}, "min_tokens: 5 is not supported"),
    (CLASSIC, {"seed": 1, "random_seed": 2}, "seed and random_seed: differ"),
    (CLASSIC, {"max_tokens": -1}, "sampling_param_max_tokens: -1 is not an integer of at"),
    (CLASSIC, {"text_input": b"\xff"}, "text_input: is not UTF-8 at byte 0"),
]


def _least(model: str) -> dict[str, Any]:
    """A request that is answered."""
    return {"text_input": "abc"} | ({"max_tokens": 4} if model == CLASSIC else {})


def test_refused_by_name(addresses: ServerAddresses) -> None:
    """All on one stream, which goes on."""
    # `ensemble` counts its own refusals nowhere, and passes these two on.
    passed_on = {"max_tokens", "text_input"}
    heard = [one for one in REFUSED if one[0] == LLM or passed_on & one[1].keys()]
    with counting(addresses, len(heard) + 2) as grown, StreamClient(addresses.grpc) as client:
        for at, (model, fields, message) in enumerate(REFUSED):
            flag = {"stream" if model == CLASSIC else "streaming": bool(at % 2)}
            answer = client.ask(model, {**_least(model), **flag, **fields})
            assert message in answer.failure and not answer.messages
            assert "\n" not in answer.failure and len(answer.failure) < 400
        for model in (LLM, CLASSIC):
            assert client.ask(model, _least(model)).error is None
    assert grown['dflash_requests_total{outcome="completed"}'] == 2
    assert grown['dflash_requests_total{outcome="refused"}'] == len(heard)


def test_between_models_a_refusal_is_an_output(addresses: ServerAddresses) -> None:
    """An error that one Python model sends another can crash Triton server 2.51."""
    for fields in ({"text_input": ""}, {"text_input": "abc", MAX: 0}):
        answer = ask_grpc(addresses.grpc, LLM, fields, parameters={"errors_as_output": True})
        assert answer.error is None
        assert answer.last["error"].startswith("INVALID_ARGrefused"), answer.last


def test_parameters_are_checked(addresses: ServerAddresses) -> None:
    for name, value, piece in (
        ("streaming_text", "words", ""),
        ("ignore_eos", "maybe", ""),
        ("add_special_tokens", 3, ""),
        ("skip_special_tokens", "maybe", ""),
        ("min_tokens", True, "True is not an integer"),
        ("end_id", "two", ""),
        ("prompt_ids", f"[{'1,' * 20_000}1]", "20,001 tokens do not fit: the context of 16384"),
        ("timeout_us", "soon", ""),
        ("timeout_us", -1, ""),
        ("block_size", 1, "1 is not an integer of at least 2"),
        ("block_size", 9, "9 is not between 2 and 8, the drafter's trained block"),
        ("block_size", True, "True is not an integer"),
        ("block_size", "4", "'4' is not an integer"),
        ("temperature", "0.7", "is no field of this model; send sampling_param_temperature"),
    ):
        answer = ask_grpc(addresses.grpc, LLM, {"text_input": "a"}, parameters={name: value})
        assert f"{name}: " in answer.failure and piece in answer.failure and not answer.messages


@pytest.mark.parametrize(
    ("model", "field", "value", "advice"),
    [
        (LLM, "max_tokens", 3, "send sampling_param_max_tokens"),
        (LLM, "temperature", 0.5, "send sampling_param_temperature"),
        (LLM, "stop_words", "x", "send sampling_param_stop"),
        (LLM, "typo", True, "leave it out"),
        (CLASSIC, "sampling_param_temperature", 0.5, "send temperature"),
        (CLASSIC, "timeout_us", 5, "leave it out"),  # it would be ignored
    ],
)
def test_a_field_that_the_model_does_not_have(
    addresses: ServerAddresses, model: str, field: str, value: Any, advice: str
) -> None:
    """Triton server makes a parameter of it, which says nothing; the client meant something."""
    least = _least(model) | {"id": "7"}
    for where in ({field: value}, {"parameters": {field: value}}):
        status, reply = post(addresses.http, f"{model}/generate", least | where)
        assert status == 400 and f"{field}: is no field of this model; {advice}" in reply["error"]
    assert post(addresses.http, f"{model}/generate", least)[0] == 200

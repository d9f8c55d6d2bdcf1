"""Attacks by the values of single fields, over both ports."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient

from tests.serving.attacks.grpc import ask
from tests.serving.attacks.http import PROMPT, ask_json
from tests.serving.attacks.table import Ending, Target, attack
from tests.serving.client import CLASSIC, LLM, make_fields, make_inputs

_CHAT = "/v1/chat/completions"
_MESSAGES: dict[str, Any] = {
    "model": "demo",
    "messages": [{"role": "user", "content": "host"}],
    "max_tokens": 4,
}
_NO_NUMBERS: tuple[Any, ...] = (float("nan"), float("inf"), 1e308, -1e308, 10**400, "1", [], True)


def _deep(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


_PATTERNS = ("(", "(" * 2000 + ")" * 2000, "a" * 70_000, "(?<n")
_SCHEMAS: tuple[Any, ...] = (
    {"type": "nothing"},
    {"$ref": "#/nowhere"},
    {"$ref": "http://127.0.0.1:9/x"},
    *({"type": "string", "pattern": one} for one in _PATTERNS),
    {"type": "string", "minLength": 10**30},
    {"type": "array", "minItems": 9, "maxItems": 3, "items": {"type": "integer"}},
    {"enum": []},
    {"enum": ["x" * 50] * 5_000},
    {"allOf": [{"type": "string"}, {"type": "integer"}]},
    _deep(90),
    "x",
    None,
)
_FORMATS: tuple[Any, ...] = (
    *("json_object", [], {}, 3, {"type": None}, {"type": ["json_object"]}, {"type": "regex"}),
    *({"type": "json_object", "schema": {}}, {"type": "json_schema"}),
    {"type": "json_schema", "json_schema": {"schema": {}, "\x1b[31m": 1}},
)


@attack(400)
def penalties_that_are_none(target: Target, random: random.Random) -> set[Ending]:
    names = ("frequency_penalty", "presence_penalty", "repetition_penalty", "temperature", "top_p")
    endings = {ask_json(target, PROMPT | {name: random.choice(_NO_NUMBERS)}) for name in names}
    return endings | {ask_json(target, PROMPT | {names[2]: one}) for one in (*_NO_NUMBERS, 0, -1)}


@attack(400)
def biases_of_no_token(target: Target, random: random.Random) -> set[Ending]:
    names = ("999999999", "2147483648", "-1", "1e3", "", " 1", "٣", "9" * 5000, "\ud800")
    biases: list[Any] = [{name: 1} for name in names]
    biases += [{"1": value} for value in (*_NO_NUMBERS[:-1], None, 101)]
    biases += [{str(number): 1 for number in range(5_000)}, {"1": 1, "01": 1}, [], "x", 3]
    return {ask_json(target, PROMPT | {"logit_bias": one}) for one in biases}


@attack(400)
def too_many_outputs(target: Target, random: random.Random) -> set[Ending]:
    asked: tuple[dict[str, Any], ...] = (
        *({"n": one} for one in (65, 2**31, 10**30, 0, -1, 1.5, "2", [2], True)),
        *({"best_of": 2}, {"prompt": ["host"] * 65}, {"prompt": ["host"] * 9, "n": 9}),
        {"prompt": [[1]] * 60_000, "n": 60_000},
    )
    return {ask_json(target, PROMPT | one) for one in asked}


@attack(400)
def prompts_of_no_tokens(target: Target, random: random.Random) -> set[Ending]:
    ids = (-1, 2**31, 10**30, 2**31 - 1, random.randint(10**6, 10**9), 1.5, None, True, [3])
    prompts: list[Any] = [[1, one] for one in ids]
    prompts += [[], [[]], [[1], "host", []], {"a": 1}, [1] * 50_000, [[1] * 50_000], ["", "host"]]
    return {ask_json(target, PROMPT | {"prompt": one}) for one in prompts}


@attack(400)
def log_probabilities_of_all(target: Target, random: random.Random) -> set[Ending]:
    numbers = (6, -1, 2**31, 10**30, 1.0, "5", True, [])
    endings = {ask_json(target, PROMPT | {"logprobs": one, "echo": True}) for one in numbers}
    numbers = (21, -1, 2**31, 10**30, 1.0, "5", True, [])
    endings |= {ask_json(target, PROMPT | {"prompt_logprobs": one}) for one in numbers}
    endings |= {ask_json(target, _MESSAGES | {"prompt_logprobs": one}, _CHAT) for one in numbers}
    tops = ({"logprobs": True, "top_logprobs": one} for one in (21, -1, 2**31, 0.5))
    return endings | {ask_json(target, _MESSAGES | one, _CHAT) for one in (*tops, {"logprobs": 5})}


@attack(400)
def formats_of_nothing(target: Target, random: random.Random) -> set[Ending]:
    """Schemas are compiled where the model has a chat template; over gRPC anyway, see below."""
    formats = [
        *_FORMATS,
        *({"type": "json_schema", "json_schema": {"schema": one}} for one in _SCHEMAS),
    ]
    return {ask_json(target, _MESSAGES | {"response_format": one}, _CHAT) for one in formats}


@attack("refused")
def grammars_of_nothing(target: Target, random: random.Random) -> set[Ending]:
    grammars = [("json_schema", json.dumps(one)) for one in _SCHEMAS]
    grammars += [("regex", one) for one in _PATTERNS]
    fields = make_fields(LLM, "host", max_tokens=2)
    asked = [json.dumps({"kind": kind, "text": text}) for kind, text in grammars]
    return {ask(target, LLM, fields, parameters={"grammar": one}) for one in asked}


@attack("refused")
def parameters_that_lie(target: Target, random: random.Random) -> set[Ending]:
    """What our own clients send to the model beside its inputs."""
    texts = ("", "[", "[" * 60_000, "{}", "3", "nan", "\0", '"x"', "9" * 5000, "null")
    ids = ("[]", "[1, -1]", f"[{2**40}]", f"[{10**30}]", "[1.0]", "[true]", "[[1]]")
    biases = (
        f'{{"{"9" * 5000}": 1}}',
        '{"1": "x"}',
        '{"1": NaN}',
        '{"99999999": 1}',
        '{"1": 1e99}',
    )
    kinds = (
        '{"kind": [], "text": ""}',
        '{"kind": "regex", "text": "("}',
        '{"kind": "x", "text": ""}',
    )
    odd: dict[str, tuple[Any, ...]] = {
        "logit_bias": (*(one for one in texts if one != "{}"), *biases, 3, True),
        "prompt_ids": (*(one for one in texts if one != "[]"), *ids, 3, False),
        "grammar": (*texts, *kinds, 3, True),
        "repetition_penalty": ("", "nan", "inf", "1e308", "-1", "0", "x", "9" * 5000, 3, True),
        "logprobs": (-1, 2**40, "3", True),
        "prompt_logprobs": (-1, 2**40, "3", True),
    }
    fields = make_fields(LLM, "host", max_tokens=2)
    return {
        ask(target, LLM, fields, parameters={name: value})
        for name, values in odd.items()
        for value in values
    }


@attack("refused")
def tensors_of_no_number(target: Target, random: random.Random) -> set[Ending]:
    endings: set[Ending] = set()
    for model, prefix in ((LLM, "sampling_param_"), (CLASSIC, "")):
        for kind in ("frequency_penalty", "presence_penalty", "temperature", "top_p"):
            for value in (np.nan, np.inf, -np.inf, -3e38):
                inputs = make_inputs(model, make_fields(model, "host", max_tokens=2))
                inputs = [one for one in inputs if one.name() != f"{prefix}{kind}"]
                tensor = grpcclient.InferInput(f"{prefix}{kind}", [1], "FP32")
                tensor.set_data_from_numpy(np.array([value], np.float32))
                endings.add(ask(target, model, [*inputs, tensor]))
    return endings

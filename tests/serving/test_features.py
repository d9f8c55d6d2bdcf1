"""What applications ask for, pair by pair: served as in this process.

`tests/lossless/test_features.py` holds the same of batches, pages and bits of logits.
"""

from __future__ import annotations

import dataclasses
import json
import math
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import numpy as np

import dflash_trt
from dflash_trt import LoadedPair, SamplingParams
from dflash_trt.decoding import Request, RequestResult
from dflash_trt.decoding.request import Continuation
from dflash_trt.sampling.token_rules import TokenRules
from dflash_trt.serving.openai.chat_request import read_completion
from tests.serving.conftest import Generate
from tests.serving.fronts import openai_client
from tests.serving.served import CLASSIC, LLM, PROMPTS, QUEUE, SLOTS, Served, StreamClient, fetch

OUTPUT, SAMPLES = 32, 3
REGEX = "[a-f ,.0-9]{30,36}"
STOPS = ["at", " r"]
BIAS = {"70": 4.0, "68": 3.0, "5": -100.0}
BANNED = {66, 67, 80}
# Numbers that FP32 holds, as which they are sent to the model.
BASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "drawn": {"temperature": 0.875, "seed": 3},
    "narrow": {"temperature": 1.125, "top_k": 50, "top_p": 0.9375, "seed": 2**40},
}
# Fields of a completion; streams and samples among them.
FEATURES: dict[str, dict[str, Any]] = {
    "grammar": {"structured_outputs": {"regex": REGEX}},
    "penalties": {"frequency_penalty": 0.5, "presence_penalty": 0.25, "repetition_penalty": 1.25},
    "bias": {"logit_bias": BIAS},
    "rules": {"allowed_token_ids": [one for one in range(464) if one not in BANNED]},
    "logprobs": {"logprobs": 3},
    "processed": {"logprobs": 2, "logprobs_mode": "processed_logprobs"},
    "prompt_logprobs": {"prompt_logprobs": 2},
    "min_p": {"min_p": 0.125},
    "stop": {"stop": STOPS},
    "late": {"min_tokens": 24, "stop_token_ids": [*range(60, 100)]},
    "kept": {"stop": STOPS, "include_stop_str_in_output": True, "skip_special_tokens": False},
    "samples": {"n": SAMPLES},
    "echo": {"echo": True},
    "stream": {"stream": True},
}
DAILY = [
    ("grammar", "penalties"),
    ("bias", "rules"),
    ("logprobs", "echo"),
    ("processed", "samples"),
    ("prompt_logprobs", "stream"),
    ("min_p", "stop"),
    ("late", "logprobs"),
    ("kept", "stream"),
]
Shown = dict[str, Any]


def make_requests(pair: LoadedPair, body: dict[str, Any]) -> list[Request]:
    """What a body asks of the runtime, sample by sample."""
    return [
        pair.request(
            one.prompt,
            rules=TokenRules(allowed=one.allowed_token_ids),
            grammar=one.grammar and pair.grammars.compile(one.grammar),
            **{each.name: getattr(one, each.name) for each in dataclasses.fields(Continuation)},
        )
        for one in read_completion(body).outputs()
    ]


def show(fields: dict[str, Any], prompt: str, result: RequestResult) -> Shown:
    """A choice of the answer, of what this process decoded."""
    values = None if result.logprobs is None else [one.logprob for one in result.logprobs]
    of_prompt = result.prompt_logprobs or ()
    echoes = "echo" in fields
    if echoes and values is not None:
        values = [None, *(one.logprob for one in of_prompt), *values]
    places = None
    if "prompt_logprobs" in fields:
        places = [None, *({str(one.token_id): one.logprob} for one in of_prompt)]
    return {
        "text": (prompt if echoes else "") + (result.text or ""),
        "reason": result.finish_reason,
        "logprobs": values,
        "prompt_logprobs": places,
    }


def ask(served: Served, body: dict[str, Any]) -> list[Shown]:
    """The choices of the served answer, whole or put together from its stream."""
    status, answer, _ = fetch(urlsplit(served.openai).netloc, "/v1/completions", body)
    assert status == 200, (answer, body)
    parts = [answer.decode()]
    if "stream" in body:
        parts = [one[6:] for one in parts[0].split("\n\n") if one.startswith("data: {")]
    found: list[Shown] = [
        {"text": "", "reason": None, "logprobs": None, "prompt_logprobs": None}
        for _ in range(body.get("n", 1))
    ]
    for part in parts:
        for choice in json.loads(part)["choices"]:
            shown = found[choice["index"]]
            shown["text"] += choice["text"]
            shown["reason"] = choice["finish_reason"] or shown["reason"]
            if choice["logprobs"] is not None:
                values = shown["logprobs"] or []
                shown["logprobs"] = values + choice["logprobs"]["token_logprobs"]
            if choice.get("prompt_logprobs") is not None:
                shown["prompt_logprobs"] = choice["prompt_logprobs"]
    return found


def assert_same(where: str, expected: Shown, got: Shown) -> None:
    for name in ("text", "reason", "logprobs"):
        assert got[name] == expected[name], f"{where}: {name}"
    if expected["prompt_logprobs"] is None:
        assert got["prompt_logprobs"] is None, where
        return
    for one, other in zip(expected["prompt_logprobs"], got["prompt_logprobs"], strict=True):
        assert (one is None) == (other is None), where
        for token_id, logprob in (one or {}).items():
            assert other[token_id]["logprob"] == logprob and math.isfinite(logprob), where


def test_served_answers_are_those_of_this_process(served: Served) -> None:
    """Greedy and drawn one way or the other, beside each other on one server."""
    cases = [
        (
            f"{base}: {' and '.join(pair)}",
            BASES[base] | FEATURES[pair[0]] | FEATURES[pair[1]],
            PROMPTS[number % len(PROMPTS)],
        )
        for number, pair in enumerate(DAILY)
        for base in ("greedy", "narrow" if number % 2 else "drawn")
    ]
    common = {"model": "demo", "max_tokens": OUTPUT}
    bodies = [common | fields | {"prompt": prompt} for _, fields, prompt in cases]
    with dflash_trt.load(served.bundle, block_schedule="none") as pair:
        asked = [make_requests(pair, body) for body in bodies]
        flat = [one for requests in asked for one in requests]
        together = pair.run(flat)
    assert sum(one.statistics.accepted_tokens for one in together) > len(together)
    with ThreadPoolExecutor((SLOTS + QUEUE) // SAMPLES) as pool:
        answers = list(pool.map(partial(ask, served), bodies))
    results = iter(together)
    for (where, fields, prompt), choices in zip(cases, answers, strict=True):
        for choice in choices:
            assert_same(where, show(fields, prompt, next(results)), choice)


PROMPT = "the red fox"


def test_a_chats_are_the_runtimes(served: Served, generate: Generate) -> None:
    sampling = SamplingParams(temperature=1.0, seed=5)
    chat = [{"role": "user", "content": PROMPT}]
    own = generate(chat, sampling, max_tokens=12, logprobs=3)
    asked: dict[str, Any] = {"model": "demo", "messages": chat, "max_tokens": 12, "seed": 5}
    asked |= {"temperature": 1.0, "logprobs": True, "top_logprobs": 3}
    client = openai_client(served.openai.removesuffix("/v1"))
    (choice,) = client.chat.completions.create(**asked).choices
    assert choice.logprobs is not None and choice.logprobs.content is not None
    content = choice.logprobs.content
    assert [one.logprob for one in content] == [one.logprob for one in own.logprobs or ()]
    for one, other in zip(content, own.logprobs or (), strict=True):
        assert tuple(top.logprob for top in one.top_logprobs) == other.top_logprobs
    said = b"".join(bytes(one.bytes or []) for one in content)
    assert said.decode() == choice.message.content == own.text
    streamed = [
        one
        for chunk in client.chat.completions.create(**asked, stream=True)
        if chunk.choices[0].logprobs is not None
        for one in chunk.choices[0].logprobs.content or []
    ]
    assert [one.model_dump() for one in streamed] == [one.model_dump() for one in content]


def test_an_echo_with_the_prompts(served: Served, generate: Generate) -> None:
    """What evaluation harnesses ask for: the log-probability of a text, token by token."""
    own = generate(PROMPT, max_tokens=2, logprobs=1, prompt_logprobs=1)
    client = openai_client(served.openai.removesuffix("/v1"))
    asked: dict[str, Any] = {"model": "demo", "max_tokens": 2, "temperature": 0}
    asked |= {"prompt": [PROMPT, PROMPT], "logprobs": 1, "echo": True}
    choices = client.completions.create(**asked).choices
    for choice in choices:
        columns = choice.logprobs
        assert columns is not None and columns.tokens is not None and columns.token_logprobs
        scored = [*(own.prompt_logprobs or ()), *(own.logprobs or ())]
        assert columns.token_logprobs == [None, *(one.logprob for one in scored)]
        assert columns.top_logprobs is not None and columns.top_logprobs[0] is None
        for top, one in zip(columns.top_logprobs[1:], scored, strict=True):
            assert max(top.values()) == one.top_logprobs[0]
        ends = np.cumsum([0, *map(len, columns.tokens)]).tolist()
        assert columns.text_offset == ends[:-1]
        assert "".join(columns.tokens) == choice.text == PROMPT + (own.text or "")


def test_tensors_of_both_contracts(served: Served, generate: Generate) -> None:
    own = generate(PROMPT, max_tokens=9, logprobs=0)
    values = [one.logprob for one in own.logprobs or ()]
    with StreamClient(served.address) as client:
        fields: dict[str, Any] = {"text_input": PROMPT}
        llm = {"sampling_param_max_tokens": 9, "return_cumulative_logprob": True}
        answer = client.ask(LLM, fields | llm)
        total = float(np.ravel(answer.messages[-1]["cumulative_logprob"])[0])
        assert math.isclose(total, sum(values), rel_tol=1e-6)
        answer = client.ask(CLASSIC, fields | {"max_tokens": 9, "return_log_probs": True})
        last = answer.messages[-1]
        assert np.allclose(np.ravel(last["output_log_probs"]), values, rtol=1e-6)
        assert math.isclose(np.ravel(last["cum_log_probs"])[0], sum(values), rel_tol=1e-6)

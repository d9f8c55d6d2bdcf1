"""Served log-probabilities are those of the runtime, through every door."""

from __future__ import annotations

import json
import math
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest

from dflash_trt.decoding import SamplingParams, TokenLogprob
from tests.serving.client import CLASSIC, LLM, StreamClient
from tests.serving.conftest import Generate
from tests.serving.fronts import openai_client
from tests.serving.served import Served, fetch

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
    texts, parts = ["", ""], [[], []]  # type: ignore[var-annotated]
    for chunk in client.completions.create(**asked, stream=True):
        (one,) = chunk.choices
        texts[one.index] += one.text
        if one.logprobs is not None:
            parts[one.index] += _rows(one.logprobs)
    assert texts == [one.text for one in choices]
    assert parts == [_rows(one.logprobs) for one in choices]


def _rows(columns: Any) -> list[tuple[Any, ...]]:
    """A completion's log-probabilities, token by token."""
    each = (columns.tokens, columns.token_logprobs, columns.top_logprobs, columns.text_offset)
    return [*zip(*each, strict=True)]


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_those_of_a_prompt(served: Served, generate: Generate, kind: str) -> None:
    """As vLLM answers them; in a stream, where vLLM has none, before any of the text."""
    is_chat, asked = kind == "chat", {"model": "demo", "n": 2, "max_tokens": 3, "temperature": 0}
    prompt: Any = [{"role": "user", "content": PROMPT}] if is_chat else PROMPT
    asked |= {"messages" if is_chat else "prompt": prompt, "prompt_logprobs": 2}
    path = "/v1/chat/completions" if is_chat else "/v1/completions"

    def ask(**more: Any) -> str:
        status, answer, _ = fetch(urlsplit(served.openai).netloc, path, asked | more)
        assert status == 200, answer
        return answer.decode()

    own = generate(prompt, max_tokens=3, prompt_logprobs=2).prompt_logprobs
    assert own is not None and any(one.rank != 1 for one in own)
    whole = json.loads(ask())
    told = [whole] if is_chat else whole["choices"]
    for first, *rest in (one["prompt_logprobs"] for one in told):
        assert first is None and PROMPT.endswith("".join(map(_text_of, rest, own)))
        for by_id, one in zip(rest, own, strict=True):
            found = {each["rank"]: (int(name), each["logprob"]) for name, each in by_id.items()}
            best = dict(enumerate(zip(one.top_ids, one.top_logprobs, strict=True), start=1))
            assert found == best | {one.rank: (one.token_id, one.logprob)}
    chunks = [json.loads(one[6:]) for one in ask(stream=True).split("\n\n") if one[6:7] == "{"]
    for at, one in enumerate(told):
        texts = [
            chunk["choices"][0].get("text") or chunk["choices"][0].get("delta", {}).get("content")
            for chunk in chunks
            if chunk["choices"][0]["index"] == at
        ]
        shown = [
            (chunk if is_chat else chunk["choices"][0]).get("prompt_logprobs")
            for chunk in chunks
            if chunk["choices"][0]["index"] == at
        ]
        place = shown.index(one["prompt_logprobs"])
        assert not any(shown[place + 1 :]) and not any(texts[: place + 1]) and any(texts)


def _text_of(by_id: dict[str, Any], one: TokenLogprob) -> str:
    return str(by_id[str(one.token_id)]["decoded_token"])


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

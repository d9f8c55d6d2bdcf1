"""The openai package against a real server: its texts are those of `generate`."""

from __future__ import annotations

from functools import partial
from typing import Any

import openai
import pytest

from dflash_trt.runtime import RequestResult, SamplingParams
from tests.serving.conftest import Generate
from tests.serving.fronts import openai_client
from tests.serving.served import GREEDY, PROMPTS, SAMPLINGS, Served


@pytest.fixture
def client(served: Served) -> openai.OpenAI:
    return openai_client(served.openai.removesuffix("/v1"))


def _fields(sampling: SamplingParams) -> dict[str, Any]:
    """The request's fields for a sampling."""
    extra = {} if sampling.top_k is None else {"extra_body": {"top_k": sampling.top_k}}
    fields = {"temperature": sampling.temperature, "top_p": sampling.top_p, "seed": sampling.seed}
    return {"model": "demo", **fields, **extra}


def _check_usage(usage: Any, result: RequestResult) -> None:
    one, details = result.statistics, usage.completion_tokens_details
    assert (usage.prompt_tokens, usage.completion_tokens) == (one.prompt_tokens, one.output_tokens)
    assert usage.total_tokens == one.prompt_tokens + one.output_tokens
    assert details.accepted_prediction_tokens == one.accepted_tokens
    assert details.rejected_prediction_tokens == one.drafted_tokens - one.accepted_tokens


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_completions(client: openai.OpenAI, generate: Generate, sampling: SamplingParams) -> None:
    expected = generate(PROMPTS[0], sampling, max_tokens=40)
    asked: dict[str, Any] = {"prompt": PROMPTS[0], "max_tokens": 40, **_fields(sampling)}
    whole = client.completions.create(**asked)
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == (expected.text, "length")
    _check_usage(whole.usage, expected)
    options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = client.completions.create(**asked, **options)
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected.text
    assert chunks[-1].choices[0].finish_reason == "length"
    _check_usage(last.usage, expected)


def test_a_chat(client: openai.OpenAI, generate: Generate) -> None:
    messages: Any = [{"role": "user", "content": PROMPTS[1]}]
    expected = generate(messages, max_tokens=40)
    plain = generate(PROMPTS[1], max_tokens=1)
    assert expected.statistics.prompt_tokens == plain.statistics.prompt_tokens + 1
    chat = partial(client.chat.completions.create, messages=messages, max_tokens=40)
    whole = chat(**_fields(GREEDY))
    assert whole.choices[0].message.content == expected.text
    _check_usage(whole.usage, expected)
    chunks = list(chat(**_fields(GREEDY), stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected.text

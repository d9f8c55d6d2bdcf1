"""The openai package against a real server: its texts are those of `generate`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import openai
import pytest

from dflash_trt.runtime import RequestResult, SamplingParams
from tests.serving.client import read_metrics
from tests.serving.conftest import count_ended, wait_idle
from tests.serving.served import PROMPTS, SAMPLINGS, SLOTS, Local, Served
from tests.waiting import PATIENCE_S, wait_until

CANCELLED = 'dflash_requests{outcome="cancelled"}'


@pytest.fixture
def client(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=served.openai, api_key="none", max_retries=0, timeout=PATIENCE_S)


def _async_client(served: Served) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=served.openai, api_key="none", max_retries=0, timeout=PATIENCE_S
    )


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
def test_completions(client: openai.OpenAI, local: Local, sampling: SamplingParams) -> None:
    expected = local.run(PROMPTS[0], 40, sampling)
    asked: dict[str, Any] = {"prompt": PROMPTS[0], "max_tokens": 40, **_fields(sampling)}
    whole = client.completions.create(**asked)
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == (expected.text, "length")
    _check_usage(whole.usage, expected)
    options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = client.completions.create(**asked, **options)
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected.text
    assert chunks[-1].choices[0].finish_reason == "length"
    _check_usage(last.usage, expected)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_chats(client: openai.OpenAI, local: Local, sampling: SamplingParams) -> None:
    expected = local.run(PROMPTS[1], 40, sampling, chat=True)
    plain = local.run(PROMPTS[1], 1)
    assert expected.statistics.prompt_tokens == plain.statistics.prompt_tokens + 1
    messages = [{"role": "user", "content": PROMPTS[1]}]
    asked: dict[str, Any] = {"messages": messages, "max_tokens": 40, **_fields(sampling)}
    whole = client.chat.completions.create(**asked)
    assert whole.choices[0].message.content == expected.text
    _check_usage(whole.usage, expected)
    chunks = list(client.chat.completions.create(**asked, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected.text


def test_special_tokens_of_a_template_are_tokens(client: openai.OpenAI, local: Local) -> None:
    messages: Any = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    answer = client.chat.completions.create(model="demo", messages=messages, max_tokens=1)
    text = "<|endoftext|>a<|endoftext|>b<|endoftext|>c"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(local.tokenizer.encode(text, special=False))


@pytest.mark.parametrize("streaming", [False, True])
def test_stop_strings(client: openai.OpenAI, local: Local, streaming: bool) -> None:
    free = local.run(PROMPTS[0], 40).text or ""
    stops = (free[25:28], free[31:33])
    expected = local.run(PROMPTS[0], 40, stops=stops)
    assert (expected.text, expected.finish_reason) == (free[:25], "stop")
    asked: dict[str, Any] = {"model": "demo", "prompt": PROMPTS[0], "temperature": 0}
    answer: Any = client.completions.create(
        **asked, stop=list(stops), max_tokens=40, stream=streaming
    )
    chunks = list(answer) if streaming else [answer]
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected.text
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_sixteen_clients_at_once(served: Served, local: Local) -> None:
    async def ask(number: int, client: openai.AsyncOpenAI) -> str:
        sampling = SAMPLINGS[number % len(SAMPLINGS)]
        asked: dict[str, Any] = {"prompt": PROMPTS[number], "max_tokens": 48, **_fields(sampling)}
        if number % 2:
            return (await client.completions.create(**asked)).choices[0].text
        stream: Any = await client.completions.create(**asked, stream=True)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def ask_all() -> list[str]:
        async with _async_client(served) as client:  # a connection for each
            return await asyncio.gather(*(ask(number, client) for number in range(16)))

    texts = asyncio.run(ask_all())
    assert texts == [result.text for result in local.run_all(PROMPTS, 48, SAMPLINGS)]


LONG: dict[str, Any] = {"model": "demo", "prompt": PROMPTS[0], "extra_body": {"ignore_eos": True}}


def test_clients_that_leave_free_their_slots(served: Served) -> None:
    """Streaming or not, running or waiting: their requests would go on for seconds."""
    count = SLOTS + 4
    before = wait_idle(served)

    def are_there() -> bool:
        now = read_metrics(served.metrics)
        held = now["dflash_active_slots"] + now["dflash_waiting_requests"]
        return held + count_ended(now) >= count + count_ended(before)

    async def ask(number: int, client: openai.AsyncOpenAI) -> None:
        asking: Awaitable[Any] = client.completions.create(
            **LONG, max_tokens=900, stream=bool(number % 2)
        )
        stream = await asking
        if number % 2:
            async for _ in stream:
                pass

    async def leave_all() -> None:
        async with _async_client(served) as client:
            asking = [asyncio.create_task(ask(number, client)) for number in range(count)]
            await asyncio.to_thread(wait_until, are_there)
            for one in asking:
                one.cancel()
            await asyncio.gather(*asking, return_exceptions=True)

    asyncio.run(leave_all())
    after = wait_idle(served, count_ended(before) + count)
    assert after[CANCELLED] - before[CANCELLED] > count / 2


def test_a_full_queue_is_503(served: Served) -> None:
    async def ask(client: openai.AsyncOpenAI) -> int:
        try:
            await client.completions.create(**LONG, max_tokens=160)
        except openai.InternalServerError as error:
            assert "the queue is full" in error.message
            return error.status_code
        return 200

    async def ask_all() -> list[int]:
        async with _async_client(served) as client:
            return await asyncio.gather(*(ask(client) for _ in range(40)))

    statuses = asyncio.run(ask_all())
    assert set(statuses) == {200, 503}
    assert statuses.count(200) >= 16


def test_what_the_model_refuses(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="tokens do not fit: the context of 1024"):
        client.completions.create(model="demo", prompt="a b c " * 600)
    with pytest.raises(openai.BadRequestError, match="cannot fit"):
        client.completions.create(model="demo", prompt="a " * 500_000)
    stream = {"stream": True}
    with pytest.raises(openai.BadRequestError, match="tokens do not fit"):
        client.completions.create(model="demo", prompt="a b c " * 600, **stream)  # type: ignore[call-overload]

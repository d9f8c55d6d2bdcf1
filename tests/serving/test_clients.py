"""The clients that people have, against a real server: the text is `generate`'s, always."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import tritonclient.grpc as grpcclient
import tritonclient.grpc.aio as aioclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from dflash_trt.runtime import SamplingParams
from dflash_trt.serving.server.launcher import ServerAddresses
from tests.serving.client import (
    CLASSIC,
    LLM,
    SAMPLINGS,
    ask_grpc,
    classic_fields,
    llm_fields,
    make_inputs,
    post,
    read_message,
)
from tests.serving.conftest import Generate, count_ended, wait_idle


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled", "narrowed"])
def test_the_text_is_generates(
    addresses: ServerAddresses, generate: Generate, prompts: list[str], sampling: dict[str, Any]
) -> None:
    result = generate(prompts[0], max_tokens=48, sampling=SamplingParams(**sampling))
    llm = llm_fields(prompts[0], sampling, return_finish_reason=True)
    classic = classic_fields(prompts[0], sampling)

    whole = ask_grpc(addresses.grpc, LLM, llm)
    assert whole.texts == [result.text]
    assert whole.last["output_ids"] == list(result.token_ids)
    assert whole.last["finish_reason"] == result.finish_reason
    assert whole.last["num_input_tokens"] == result.statistics.prompt_tokens
    assert whole.last["num_output_tokens"] == result.statistics.output_tokens
    assert whole.last["num_verify_steps"] == result.statistics.steps
    assert whole.last["acceptance_histogram"] == list(result.statistics.acceptance_histogram)
    assert whole.last["position_trials"] == list(result.statistics.position_trials)
    assert whole.last["position_accepts"] == list(result.statistics.position_accepts)
    assert whole.last["total_draft_tokens"] == result.statistics.drafted_tokens
    assert whole.last["total_accepted_draft_tokens"] == result.statistics.accepted_tokens
    assert whole.last["acceptance_rate"] == pytest.approx(result.statistics.acceptance_rate)

    streamed = ask_grpc(addresses.grpc, LLM, {**llm, "streaming": True})
    assert streamed.texts[-1] == result.text
    for shorter, longer in zip(streamed.texts, streamed.texts[1:], strict=False):
        assert longer.startswith(shorter)
    assert all("num_verify_steps" not in one for one in streamed.messages[:-1])

    whole = ask_grpc(addresses.grpc, CLASSIC, classic)
    assert whole.texts == [result.text] and whole.last["sequence_index"] == 0
    streamed = ask_grpc(addresses.grpc, CLASSIC, {**classic, "stream": True})
    assert "".join(streamed.texts) == result.text

    for path, body in ((LLM, llm), (CLASSIC, classic)):
        status, reply = post(addresses.http, f"{path}/generate", body)
        assert (status, reply["text_output"]) == (200, result.text)
    status, events = post(addresses.http, f"{LLM}/generate_stream", {**llm, "streaming": True})
    assert status == 200 and events[-1]["text_output"] == result.text
    status, events = post(addresses.http, f"{CLASSIC}/generate_stream", {**classic, "stream": True})
    assert status == 200 and "".join(event["text_output"] for event in events) == result.text


@pytest.mark.parametrize("model", [LLM, CLASSIC])
def test_sixteen_clients_at_once(
    addresses: ServerAddresses, generate: Generate, prompts: list[str], model: str
) -> None:
    expected = [
        generate(prompt, max_tokens=48, sampling=SamplingParams(**SAMPLINGS[number % 3])).text
        for number, prompt in enumerate(prompts[:16])
    ]

    def ask(number: int) -> str:
        make = llm_fields if model == LLM else classic_fields
        fields = make(prompts[number], SAMPLINGS[number % 3])
        streams = number % 2 == 1
        if streams:
            fields["streaming" if model == LLM else "stream"] = True
        texts = ask_grpc(addresses.grpc, model, fields).texts
        return texts[-1] if model == LLM else "".join(texts)

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(ask, range(16))) == expected


def test_long_answers_come_in_pieces(
    addresses: ServerAddresses, generate: Generate, prompts: list[str]
) -> None:
    """How many is up to the machine: replies are merged while one is under way."""
    text = generate(prompts[1], max_tokens=600, ignore_eos=True).text
    fields = {**llm_fields(prompts[1], {}), "sampling_param_max_tokens": 600, "streaming": True}
    texts = ask_grpc(addresses.grpc, LLM, fields, parameters={"ignore_eos": True}).texts
    assert len(texts) > 1 and texts[-1] == text


def test_aio(addresses: ServerAddresses, generate: Generate, prompts: list[str]) -> None:
    expected = generate(prompts[1], max_tokens=48).text

    async def run() -> list[str]:
        async def requests() -> AsyncIterator[dict[str, Any]]:
            fields = llm_fields(prompts[1], {}, streaming=True)
            yield {"model_name": LLM, "inputs": make_inputs(LLM, fields)}

        texts: list[str] = []
        async with aioclient.InferenceServerClient(addresses.grpc) as client:
            async for result, error in client.stream_infer(requests()):
                assert error is None
                texts.append(read_message(result)["text_output"])
        return texts

    assert asyncio.run(run())[-1] == expected


def test_models_describe_themselves(addresses: ServerAddresses) -> None:
    with httpclient.InferenceServerClient(addresses.http) as client:
        for model, required in ((LLM, {"text_input"}), (CLASSIC, {"text_input", "max_tokens"})):
            assert client.is_model_ready(model)
            config = client.get_model_config(model)
            inputs = {one["name"]: one for one in config["input"]}
            assert {name for name, one in inputs.items() if not one["optional"]} == required
            assert config["model_transaction_policy"]["decoupled"]


def test_a_call_that_cannot_stream_says_so(addresses: ServerAddresses) -> None:
    """Triton server's own answer to ModelInfer on a model that can stream."""
    with grpcclient.InferenceServerClient(addresses.grpc) as client:
        inputs = make_inputs(LLM, {"text_input": "abc"})
        with pytest.raises(InferenceServerException, match="decoupled transaction policy"):
            client.infer(LLM, inputs)


def test_stop_strings(addresses: ServerAddresses, generate: Generate, prompts: list[str]) -> None:
    """A text that no message holds whole: it is cut before it, and none of it is ever shown."""
    text = generate(prompts[2], max_tokens=64).text
    assert text is not None and len(text) > 40
    for begin, end in ((8, 21), (10, 33), (3, 5)):
        stop = text[begin:end]
        cut = text[: text.index(stop)]
        fields = {
            **llm_fields(prompts[2], {}, streaming=True, return_finish_reason=True),
            "sampling_param_stop": ["never", stop],
            "sampling_param_max_tokens": 64,
            "return_stop_reason": True,
        }
        answer = ask_grpc(addresses.grpc, LLM, fields)
        assert answer.texts[-1] == cut and all(cut.startswith(one) for one in answer.texts)
        assert (answer.last["finish_reason"], answer.last["stop_reason"]) == ("stop", stop)
        words = {**classic_fields(prompts[2], {}, stream=True), "stop_words": ["", stop]}
        assert "".join(ask_grpc(addresses.grpc, CLASSIC, words).texts) == cut


def test_options_of_the_contracts(
    addresses: ServerAddresses, generate: Generate, prompts: list[str]
) -> None:
    prompt = prompts[3]
    text = generate(prompt, max_tokens=48).text
    assert text is not None
    llm, classic = llm_fields(prompt, {}), classic_fields(prompt, {})
    with_prompt = {**llm, "sampling_param_exclude_input_from_output": False}
    assert ask_grpc(addresses.grpc, LLM, with_prompt).texts == [prompt + text]
    answer = ask_grpc(addresses.grpc, LLM, {**with_prompt, "streaming": True})
    assert answer.texts[0].startswith(prompt) and answer.texts[-1] == prompt + text
    delta = {"streaming_text": "delta"}
    answer = ask_grpc(addresses.grpc, LLM, {**llm, "streaming": True}, parameters=delta)
    assert "".join(answer.texts) == text
    cumulative = {**classic, "stream": True, "exclude_input_in_output": False}
    answer = ask_grpc(
        addresses.grpc, CLASSIC, cumulative, parameters={"streaming_text": "cumulative"}
    )
    assert answer.texts[-1] == prompt + text

    timed = ask_grpc(addresses.grpc, LLM, {**llm, "sampling_param_return_perf_metrics": True}).last
    moments = [timed[f"{name}_time_ns"] for name in ("arrival", "first_scheduled", "first_token")]
    assert moments == sorted(moments) and moments[-1] < timed["last_token_time_ns"]
    counted = {"return_num_input_tokens": True, "return_num_output_tokens": True}
    answer = ask_grpc(addresses.grpc, CLASSIC, {**classic, **counted, "random_seed": 3})
    assert answer.last["num_output_tokens"] == 48 and answer.last["num_input_tokens"] > 10
    end_id = generate(prompt, max_tokens=48).token_ids[5]
    answer = ask_grpc(addresses.grpc, CLASSIC, {**classic, **counted, "end_id": end_id})
    assert answer.last["num_output_tokens"] <= 6
    # What tutorials send along: each at the value that asks for nothing.
    neutral = {
        "bad_words": "",
        "stop_words": "",
        "beam_width": 1,
        "pad_id": 2,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "length_penalty": 1.0,
        "top_k": 1,
        "top_p": 0.0,
        "temperature": 1.0,
    }
    assert ask_grpc(addresses.grpc, CLASSIC, {**classic, **neutral}).texts == [text]


def test_metrics_count(addresses: ServerAddresses, generate: Generate, prompts: list[str]) -> None:
    before = wait_idle(addresses)
    statistics = generate(prompts[4], max_tokens=48).statistics
    assert ask_grpc(addresses.grpc, LLM, llm_fields(prompts[4], {})).error is None
    after = wait_idle(addresses, count_ended(before) + 1)
    for name, value in {
        'dflash_requests{outcome="completed"}': 1,
        "dflash_input_tokens": statistics.prompt_tokens,
        "dflash_output_tokens": 48,
        "dflash_verify_steps": statistics.steps,
        "dflash_step_tokens": 47,
        "dflash_draft_tokens": statistics.drafted_tokens,
        "dflash_accepted_draft_tokens": statistics.accepted_tokens,
        "dflash_queue_seconds_count": 1,
        "dflash_time_to_first_token_seconds_count": 1,
        "dflash_time_per_output_token_seconds_count": 1,
    }.items():
        assert after[name] - before[name] == value, name
    tau = after["dflash_step_tokens"] / after["dflash_verify_steps"]
    assert after["dflash_acceptance_length"] == pytest.approx(tau)

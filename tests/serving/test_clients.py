"""The clients that people have, against a real server: the text is `generate`'s, always."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import pairwise
from typing import Any

import openai
import pytest

import dflash_trt
from dflash_trt.bundle.bundle import load_tokenizer, open_bundle
from dflash_trt.decoding import Penalties, RequestResult, SamplingParams
from dflash_trt.serving.server.launcher import ServerAddresses
from dflash_trt.serving.server.metrics import KINDS
from dflash_trt.text.grammar import Grammar
from dflash_trt.version import __version__
from tests.serving.conftest import Generate, count_ended, counting, wait_idle
from tests.serving.fronts import openai_client
from tests.serving.served import (
    CLASSIC,
    ENDLESS,
    GREEDY,
    LLM,
    PROMPTS,
    QUEUE,
    SAMPLINGS,
    Served,
    StreamClient,
    ask_grpc,
    fetch,
    long_fields,
    make_fields,
    post,
    read_metrics,
)
from tests.waiting import wait_until

GBNF = 'root ::= "n" two\ntwo ::= [0-9] [0-9]'
GREEDY_CHOICES: dict[str, Any] = {"top_k": 1, "top_p": 0.0, "temperature": 1.0}


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled", "narrowed"])
def test_the_text_is_generates(
    addresses: ServerAddresses, generate: Generate, sampling: SamplingParams
) -> None:
    result = generate(PROMPTS[0], sampling, max_tokens=48)
    one = result.statistics

    llm = make_fields(LLM, PROMPTS[0], sampling, return_finish_reason=True)
    whole = ask_grpc(addresses.grpc, LLM, llm)
    assert whole.texts == [result.text]
    expected = {
        "output_ids": list(result.token_ids),
        "finish_reason": result.finish_reason,
        "num_input_tokens": one.prompt_tokens,
        "num_output_tokens": one.output_tokens,
        "num_verify_steps": one.steps,
        "acceptance_histogram": list(one.acceptance_histogram),
        "position_trials": list(one.position_trials),
        "position_accepts": list(one.position_accepts),
        "total_draft_tokens": one.drafted_tokens,
        "total_accepted_draft_tokens": one.accepted_tokens,
        "acceptance_rate": pytest.approx(one.acceptance_rate),
    }
    assert {name: whole.last[name] for name in expected} == expected
    streamed = ask_grpc(addresses.grpc, LLM, {**llm, "streaming": True})
    assert streamed.texts[-1] == result.text
    assert all(longer.startswith(shorter) for shorter, longer in pairwise(streamed.texts))
    assert all("num_verify_steps" not in message for message in streamed.messages[:-1])

    classic = make_fields(CLASSIC, PROMPTS[0], sampling)
    whole = ask_grpc(addresses.grpc, CLASSIC, classic)
    assert whole.texts == [result.text] and whole.last["sequence_index"] == 0
    streamed = ask_grpc(addresses.grpc, CLASSIC, {**classic, "stream": True})
    assert "".join(streamed.texts) == result.text

    for model, body in ((LLM, llm), (CLASSIC, classic)):
        status, reply = post(addresses.http, f"{model}/generate", body)
        assert (status, reply["text_output"]) == (200, result.text)
        flag = {"streaming" if model == LLM else "stream": True}
        status, events = post(addresses.http, f"{model}/generate_stream", {**body, **flag})
        texts = [event["text_output"] for event in events]
        assert status == 200
        assert (texts[-1] if model == LLM else "".join(texts)) == result.text


def test_stop_strings(addresses: ServerAddresses, generate: Generate) -> None:
    """A text that no message holds whole: it is cut before it, and none of it is ever shown."""
    text = generate(PROMPTS[2], max_tokens=64).text
    assert text is not None and len(text) > 40
    stop = text[10:33]
    cut = text[: text.index(stop)]
    wanted = {"return_finish_reason": True, "return_stop_reason": True}
    fields = make_fields(LLM, PROMPTS[2], max_tokens=64, stream=True, **wanted)
    answer = ask_grpc(addresses.grpc, LLM, fields | {"sampling_param_stop": ["never", stop]})
    assert answer.texts[-1] == cut and all(cut.startswith(one) for one in answer.texts)
    assert (answer.last["finish_reason"], answer.last["stop_reason"]) == ("stop", stop)
    words = make_fields(CLASSIC, PROMPTS[2], stream=True, stop_words=["", stop])
    assert "".join(ask_grpc(addresses.grpc, CLASSIC, words).texts) == cut


def test_stop_tokens(addresses: ServerAddresses, served: Served, generate: Generate) -> None:
    """Of a special token the text, which is not shown; of any token the id."""
    result = generate(PROMPTS[2], max_tokens=32)
    at = result.token_ids.index(result.token_ids[9])
    ids = {"stop_token_ids": json.dumps([result.token_ids[9]])}
    count = "num_output_tokens"
    for model, extra in ((LLM, {}), (CLASSIC, {f"return_{count}": True})):
        fields = make_fields(model, PROMPTS[2], **extra)
        assert ask_grpc(addresses.grpc, model, fields, parameters=ids).last[count] == at + 1
    fields = make_fields(LLM, PROMPTS[2], sampling_param_stop="<|mask|>", return_stop_reason=True)
    last = ask_grpc(addresses.grpc, LLM, fields, parameters={"logit_bias": '{"1": 100}'}).last
    assert (last["text_output"], last[count], last["stop_reason"]) == ("", 1, "<|mask|>")
    client = openai_client(served.openai.removesuffix("/v1"))
    asked: dict[str, Any] = {"model": "demo", "prompt": PROMPTS[2], "max_tokens": 32}
    stopped = {"stop": ["<|mask|>"], "logit_bias": {"1": 100}}
    for fields in (stopped, {"extra_body": {"stop_token_ids": [result.token_ids[9]]}}):
        whole = client.completions.create(**asked, **fields, temperature=0)
        count_of = 1 if "stop" in fields else at + 1
        assert whole.usage is not None and whole.usage.completion_tokens == count_of
        assert whole.choices[0].finish_reason == "stop" and "mask" not in whole.choices[0].text
        streamed = [*client.completions.create(**asked, **fields, temperature=0, stream=True)]
        assert "".join(one.choices[0].text for one in streamed) == whole.choices[0].text


def test_options_of_the_contracts(addresses: ServerAddresses, generate: Generate) -> None:
    prompt = PROMPTS[3]
    result = generate(prompt, max_tokens=48)
    text = result.text
    assert text is not None
    llm, classic = make_fields(LLM, prompt), make_fields(CLASSIC, prompt)
    with_prompt = {**llm, "sampling_param_exclude_input_from_output": False}
    assert ask_grpc(addresses.grpc, LLM, with_prompt).texts == [prompt + text]
    answer = ask_grpc(addresses.grpc, LLM, {**with_prompt, "streaming": True})
    assert answer.texts[0].startswith(prompt) and answer.texts[-1] == prompt + text
    delta = {"streaming_text": "delta"}
    answer = ask_grpc(addresses.grpc, LLM, {**llm, "streaming": True}, parameters=delta)
    assert "".join(answer.texts) == text
    whole = {**classic, "stream": True, "exclude_input_in_output": False}
    cumulative = {"streaming_text": "cumulative"}
    answer = ask_grpc(addresses.grpc, CLASSIC, whole, parameters=cumulative)
    assert answer.texts[-1] == prompt + text

    timed = ask_grpc(addresses.grpc, LLM, {**llm, "sampling_param_return_perf_metrics": True}).last
    moments = [timed[f"{name}_time_ns"] for name in ("arrival", "first_scheduled", "first_token")]
    assert moments == sorted(moments) and moments[-1] < timed["last_token_time_ns"]
    counted = {"return_num_output_tokens": True}
    end_id = result.token_ids[5]
    answer = ask_grpc(addresses.grpc, CLASSIC, {**classic, **counted, "end_id": end_id})
    assert answer.last["num_output_tokens"] <= 6
    # What tutorials send along: each at the value that asks for nothing.
    empty = dict.fromkeys(("bad_words", "stop_words"), "")
    ones = {"beam_width": 1, "repetition_penalty": 1.0, "length_penalty": 1.0}
    neutral = {**empty, **ones, **GREEDY_CHOICES, "pad_id": 2, "presence_penalty": 0.0}
    assert ask_grpc(addresses.grpc, CLASSIC, {**classic, **neutral}).texts == [text]


def test_metrics_count(addresses: ServerAddresses, generate: Generate) -> None:
    statistics = generate(PROMPTS[4], max_tokens=48).statistics
    with counting(addresses, 1) as grown:
        assert ask_grpc(addresses.grpc, LLM, make_fields(LLM, PROMPTS[4])).error is None
    expected = {
        'dflash_requests_total{outcome="completed"}': 1,
        "dflash_prompt_tokens_total": statistics.prompt_tokens,
        "dflash_output_tokens_total": 48,
        "dflash_verify_steps_total": statistics.steps,
        "dflash_step_tokens_total": 47,
        "dflash_draft_tokens_total": statistics.drafted_tokens,
        "dflash_accepted_draft_tokens_total": statistics.accepted_tokens,
        "dflash_queue_seconds_count": 1,
        "dflash_time_to_first_token_seconds_count": 1,
        "dflash_time_per_output_token_seconds_count": 1,
        "dflash_request_seconds_count": 1,
        "dflash_request_prompt_tokens_sum": statistics.prompt_tokens,
        "dflash_request_output_tokens_sum": 48,
        **{
            f'dflash_accepted_draft_tokens_by_position_total{{position="{place}"}}': accepted
            for place, accepted in enumerate(statistics.position_accepts, start=1)
        },
    }
    assert {name: grown[name] for name in expected} == expected
    figures = wait_idle(addresses)
    tau = figures["dflash_step_tokens_total"] / figures["dflash_verify_steps_total"]
    assert figures["dflash_acceptance_length"] == pytest.approx(tau)
    assert (figures["dflash_slots"], figures["dflash_waiting_requests_limit"]) == (8, QUEUE)
    text = fetch(addresses.metrics, "/metrics", b"", "GET")[1].decode()
    said = {line for line in text.splitlines() if line.startswith("# TYPE dflash_")}
    assert said == {f"# TYPE {name} {kind}" for name, kind in KINDS.items()}
    assert text.count("# HELP dflash_") == len(KINDS)
    about = 'block_schedule="fixed",block_size="8",drafter="dflash",model="demo"'
    assert f'dflash_build_info{{{about},version="{__version__}"}} 1\n' in text


def test_counters_move_while_a_request_runs(addresses: ServerAddresses) -> None:
    """And what it has done counts, though it has no result."""
    moving = ("output_tokens", "verify_steps", "accepted_draft_tokens")

    def read() -> list[float]:
        figures = read_metrics(addresses.metrics)
        assert count_ended(figures) == count_ended(before)
        return [figures[f"dflash_{one}_total"] - before[f"dflash_{one}_total"] for one in moving]

    before = wait_idle(addresses)
    with counting(addresses, 1) as grown, StreamClient(addresses.grpc) as client:
        client.send(LLM, long_fields(LLM, PROMPTS[0]), parameters=ENDLESS)
        next(client.receive())
        wait_until(lambda: all(one > 0 for one in read()), "counters that move")
        told = read()
        wait_until(lambda: all(now > one for now, one in zip(read(), told, strict=True)))
        client.close(cancel=True)
    assert grown["dflash_output_tokens_total"] > told[0]


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
    assert details.num_verify_steps == one.steps


def test_token_ids(client: openai.OpenAI, served: Served, generate: Generate) -> None:
    """They are as good as their text; one that there is not is refused, wherever it is named."""
    ids = load_tokenizer(open_bundle(served.bundle)).encode(PROMPTS[0], special=True)
    asked: dict[str, Any] = {"max_tokens": 9, **_fields(GREEDY)}
    whole = client.completions.create(prompt=[ids], **asked)
    assert whole.choices[0].text == generate(PROMPTS[0], max_tokens=9).text
    for wrong in ({"prompt": [5, 99999]}, {"logit_bias": {"99999": 1}}):
        with pytest.raises(openai.BadRequestError, match="token id 99999 is outside"):
            client.completions.create(**{"prompt": "a"} | asked | wrong)
    with pytest.raises(openai.BadRequestError, match="token id 99999 is outside"):
        client.completions.create(prompt="a", **asked, extra_body={"allowed_token_ids": [99999]})


def test_penalties_of_the_contract(addresses: ServerAddresses, generate: Generate) -> None:
    """Penalties are TensorRT-LLM's: over the prompt too, after the temperature."""
    fields = {"text_input": PROMPTS[0], "max_tokens": 30}
    penalties = {"frequency_penalty": 0.25, "presence_penalty": 0.5, "repetition_penalty": 1.25}
    given = Penalties(frequency=0.25, presence=0.5, repetition=1.25, counts_prompt=True)
    drawn = SamplingParams(temperature=0.5, seed=6)
    for sampling, scale in ((GREEDY, 1.0), (drawn, 0.5)):
        theirs = replace(given, scale=scale)
        plain = generate(PROMPTS[0], max_tokens=30, sampling=sampling, penalties=theirs)
        assert plain.text != generate(PROMPTS[0], max_tokens=30, sampling=sampling).text
        more = {} if sampling.greedy else {"temperature": 0.5, "seed": 6}
        answer = ask_grpc(addresses.grpc, CLASSIC, fields | penalties | more)
        assert "".join(answer.texts) == plain.text


def test_response_format(client: openai.OpenAI, served: Served, addresses: ServerAddresses) -> None:
    """A schema of the OpenAI port, and a guide of either contract."""
    properties: Any = {"state": {"enum": ["ok", "lost"]}, "load": {"type": "integer", "maximum": 9}}
    schema: Any = {"type": "object", "properties": properties, "required": ["state", "load"]}
    schema["additionalProperties"] = False
    messages: Any = [{"role": "user", "content": PROMPTS[1]}]
    with dflash_trt.load(served.bundle, block_schedule="none") as pair:
        grammar = pair.grammars.compile(Grammar("json_schema", json.dumps(schema)))
        (expected,) = pair.generate([messages], max_tokens=300, grammar=grammar)
    wrapped = {"type": "json_schema", "json_schema": {"name": "host", "schema": schema}}
    asked: Any = {"messages": messages, "max_tokens": 300, **_fields(GREEDY)}
    with counting(served, 1) as grown:
        whole = client.chat.completions.create(**asked, response_format=wrapped)
    assert whole.choices[0].message.content == expected.text
    _check_usage(whole.usage, expected)
    one = expected.statistics
    assert grown['dflash_grammars_total{outcome="compiled"}'] == 1
    assert grown["dflash_constrained_verify_steps_total"] == one.steps
    assert grown["dflash_constrained_step_tokens_total"] == one.output_tokens - 1
    assert grown["dflash_forced_draft_tokens_total"] == one.forced_tokens != 0
    assert grown["dflash_grammar_seconds_total"] > 0
    assert json.loads(expected.text or "").keys() == properties.keys()
    wrapped["json_schema"]["schema"] = {"type": "strin"}
    with pytest.raises(openai.BadRequestError, match="Invalid type: strin"):
        client.chat.completions.create(**asked, response_format=wrapped)
    rules = {"guided_decoding_guide_type": "ebnf_grammar", "guided_decoding_guide": GBNF}
    fields = {"text_input": PROMPTS[0], "max_tokens": 9}
    assert re.fullmatch("n[0-9]{2}", ask_grpc(addresses.grpc, CLASSIC, fields | rules).texts[0])
    llm = make_fields(LLM, PROMPTS[0], max_tokens=9)
    answer = ask_grpc(addresses.grpc, LLM, llm, parameters=rules)
    assert re.fullmatch("n[0-9]{2}", answer.texts[-1])
    refused = {**fields, **rules, "guided_decoding_guide_type": "structural_tag"}
    assert "is none of json" in ask_grpc(addresses.grpc, CLASSIC, refused).failure


def test_a_message_in_the_template(addresses: ServerAddresses, generate: Generate) -> None:
    """Where a client of gRPC asks for it."""
    expected = generate([{"role": "user", "content": PROMPTS[0]}], max_tokens=24)
    fields = make_fields(LLM, PROMPTS[0], max_tokens=24)
    answer = ask_grpc(addresses.grpc, LLM, fields, parameters={"apply_chat_template": True})
    assert answer.texts == [expected.text]
    assert answer.last["num_input_tokens"] == expected.statistics.prompt_tokens


@pytest.mark.parametrize("model", [LLM, CLASSIC])
def test_block_size_of_a_request(
    addresses: ServerAddresses, generate: Generate, model: str
) -> None:
    drafted: list[int] = []
    for size in (2, 5, 8):
        expected = generate(PROMPTS[0], max_tokens=48, block_size=size)
        fields = make_fields(model, PROMPTS[0])
        answer = ask_grpc(addresses.grpc, model, fields, parameters={"block_size": size})
        assert answer.texts == [expected.text]
        drafted.append(answer.last["total_draft_tokens"])
        assert drafted[-1] == expected.statistics.drafted_tokens
    assert len(set(drafted)) == 3

"""The autoregressive baseline, and blocks of other sizes, served: the same text in other steps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash_trt.serving.server.launcher import ServerAddresses
from dflash_trt.serving.server.tritonserver import TritonServerBinary
from tests.serving.client import CLASSIC, LLM, ask_grpc, make_fields, read_metrics
from tests.serving.conftest import Generate
from tests.serving.served import PROMPTS, SAMPLINGS, Served, serving


@pytest.fixture(scope="module")
def baseline(tritonserver: TritonServerBinary, chat_bundle: Path) -> Iterator[Served]:
    with serving(chat_bundle, chat_bundle, "--no-speculation") as running:
        yield running


def test_texts_of_speculation_one_token_a_step(baseline: Served, generate: Generate) -> None:
    for prompt, sampling in zip(PROMPTS, SAMPLINGS, strict=False):
        expected = generate(prompt, sampling, max_tokens=48)
        assert expected.statistics.drafted_tokens and expected.text
        tokens = len(expected.token_ids)
        for model, more in ((LLM, {}), (CLASSIC, {"return_num_output_tokens": True})):
            answer = ask_grpc(baseline.address, model, make_fields(model, prompt, sampling, **more))
            assert answer.texts == [expected.text]
            assert answer.last["total_draft_tokens"] == 0
            assert answer.last["total_accepted_draft_tokens"] == 0
            assert answer.last["num_output_tokens"] == tokens
            assert "acceptance_rate" not in answer.last
            if model == LLM:  # the prompt's pass gives the first token
                assert answer.last["num_verify_steps"] == tokens - 1
                assert answer.last["acceptance_histogram"][0] == tokens - 1
        assert expected.statistics.steps < tokens - 1
    metrics = read_metrics(baseline.metrics)
    assert metrics["dflash_draft_tokens"] == 0 < metrics["dflash_verify_steps"]


def test_there_is_no_block_to_choose(baseline: Served) -> None:
    fields = make_fields(LLM, "a", max_tokens=2)
    answer = ask_grpc(baseline.address, LLM, fields, parameters={"block_size": 4})
    assert "block_size: it needs speculation, which is off here; leave it out" in answer.failure


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

"""Bundles served otherwise: without speculation, with limits, other blocks, paged caches."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest

from dflash_trt.bundle.bundle import Bundle, load_tokenizer, open_bundle
from dflash_trt.cli.main import main
from dflash_trt.serving.server.launcher import ServerAddresses
from dflash_trt.serving.server.tritonserver import TritonServerBinary
from tests.cli.conftest import Run
from tests.serving.client import (
    CLASSIC,
    ENDLESS,
    LLM,
    Answer,
    ask_grpc,
    long_fields,
    make_fields,
    read_metrics,
)
from tests.serving.conftest import Generate, wait_idle
from tests.serving.served import PROMPTS, SAMPLINGS, Served, fetch, serving
from tests.waiting import PATIENCE_S

SECONDS, QUEUE = 4, 3


@pytest.fixture(scope="module")
def limited(tritonserver: TritonServerBinary, long_bundle: Path) -> Iterator[Served]:
    """Without speculation, with a short queue, and for requests that take seconds at most."""
    options = ["--drafter", "none", "--max-queue-size", str(QUEUE)]
    seconds = ["--request-seconds", str(SECONDS)]
    with serving(long_bundle, long_bundle, *options, *seconds) as running:
        yield running


@pytest.mark.exhaustive
def test_texts_of_speculation_one_token_a_step(limited: Served, generate: Generate) -> None:
    for prompt, sampling in zip(PROMPTS, SAMPLINGS, strict=False):
        expected = generate(prompt, sampling, max_tokens=48)
        assert expected.statistics.drafted_tokens and expected.text
        tokens = len(expected.token_ids)
        for model, more in ((LLM, {}), (CLASSIC, {"return_num_output_tokens": True})):
            answer = ask_grpc(limited.address, model, make_fields(model, prompt, sampling, **more))
            assert answer.texts == [expected.text]
            assert answer.last["total_draft_tokens"] == 0
            assert answer.last["total_accepted_draft_tokens"] == 0
            assert answer.last["num_output_tokens"] == tokens
            assert "acceptance_rate" not in answer.last
            if model == LLM:  # the prompt's pass gives the first token
                assert answer.last["num_verify_steps"] == tokens - 1
                assert answer.last["acceptance_histogram"][0] == tokens - 1
        assert expected.statistics.steps < tokens - 1
    metrics = read_metrics(limited.metrics)
    assert metrics["dflash_draft_tokens_total"] == 0 < metrics["dflash_verify_steps_total"]


@pytest.mark.exhaustive
def test_there_is_no_block_to_choose(limited: Served) -> None:
    fields = make_fields(LLM, "a", max_tokens=2)
    answer = ask_grpc(limited.address, LLM, fields, parameters={"block_size": 4})
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


@pytest.mark.exhaustive
def test_nobody_runs_for_ever(limited: Served) -> None:
    front = urlsplit(limited.openai).netloc

    def ask(streaming: bool) -> tuple[int, bytes, Any]:
        body = {"model": "demo", "prompt": "host", "max_tokens": 16000, "stream": streaming}
        return fetch(front, "/v1/completions", body | ENDLESS)

    def ask_patiently(model: str) -> Answer:
        options: dict[str, Any] = {"timeout_us": 10**9, "parameters": ENDLESS}
        return ask_grpc(limited.address, model, long_fields(model, PROMPTS[0]), **options)

    with ThreadPoolExecutor(4) as pool:
        patient = pool.map(ask_patiently, (LLM, CLASSIC))
        streamed, whole = pool.map(ask, (True, False))
    assert all("the deadline has passed" in one.failure for one in patient)
    for status, content, headers in (streamed, whole):
        assert content.count(b'"error"') == 1
        if status == 200:  # a stream, which had begun
            *_, content = content.removesuffix(b"\n\n").split(b"data: ")
        else:
            assert status == 504 and headers["x-should-retry"] == "false"
        told = json.loads(content)["error"]
        assert told["code"] == "timeout" and "the deadline has passed" in told["message"]
    assert whole[0] == 504
    figures = wait_idle(limited)
    assert figures['dflash_requests_total{outcome="timed_out"}'] == 4
    assert figures["dflash_waiting_requests_limit"] == QUEUE


PAGE = 16
PROMPT = "".join(PROMPTS[:3])


@pytest.fixture(scope="module")
def paged(
    tritonserver: TritonServerBinary, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    bundle = tmp_path_factory.mktemp("paged") / "bundle"
    layout = ["--kv-layout", "paged", "--page-size", str(PAGE)]
    assert main(["build", "--target", "demo", *layout, "-o", str(bundle)]) == 0
    with serving(bundle, bundle) as running:
        yield running


@pytest.mark.exhaustive
def test_a_prefix_hit_is_told(run: Run, paged: Served, tmp_path: Path) -> None:
    tokens = len(load_tokenizer(open_bundle(paged.bundle)).encode(PROMPT))
    # Whole pages, and the last token is always run.
    hit = (tokens - 1) // PAGE * PAGE
    assert hit > 2 * PAGE
    texts: list[str] = []
    for expected in (0, hit):
        answer = ask_grpc(paged.address, LLM, make_fields(LLM, PROMPT, max_tokens=8))
        texts += answer.texts
        assert (answer.last["cached_prompt_tokens"], answer.last["preemptions"]) == (expected, 0)
    assert texts[0] == texts[1]
    classic = make_fields(CLASSIC, PROMPT, max_tokens=8)
    assert ask_grpc(paged.address, CLASSIC, classic).texts == texts[:1]
    with openai.OpenAI(base_url=paged.openai, api_key="none", timeout=PATIENCE_S) as client:
        usage = client.completions.create(model="demo", prompt=PROMPT, max_tokens=8).usage
    assert usage is not None and usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == hit
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPT + "\n")
    common = ["--prompt-file", file, "--raw", "--max-tokens", 8]
    shown = run("generate", "--url", paged.grpc, *common)
    assert f"{hit} prompt tokens taken from other requests, 0 preemptions" in shown.err
    record = run("generate", "--url", paged.grpc, *common, "--json").json
    assert (record["cached_prompt_tokens"], record["preemptions"]) == (hit, 0)


def test_a_repository_has_decided(run: Run, bundle: Bundle, tmp_path: Path) -> None:
    options = ["--max-queue-size", "3", "--request-seconds", "60", "--drafter", "none"]
    outcome = run("package", bundle.folder, "-o", tmp_path / "repository", *options)
    said = "a queue of 3, threads by the machine that serves, 60 s for a request, no speculation\n"
    assert outcome.code == 0 and outcome.out.endswith(said)
    config = (tmp_path / "repository" / LLM / "config.pbtxt").read_text(encoding="utf-8")
    assert '"request_seconds"  value: { string_value: "60" }' in config
    for option in (["--max-queue-size", "3"], ["--request-seconds", "1"], ["--drafter", "none"]):
        refused = run("serve", tmp_path / "repository", *option)
        refused.fails(2, f"error: {option[0]}: is a model repository, whose config.pbtxt says")
        assert f"`dflash-trt package {option[0]}`" in refused.err

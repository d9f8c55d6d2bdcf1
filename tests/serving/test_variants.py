"""Bundles served otherwise: without speculation, with limits, other blocks, paged caches."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from dflash_trt.bundle.bundle import Bundle, load_tokenizer, open_bundle
from dflash_trt.cli.main import main
from dflash_trt.serving.server.launcher import ServerAddresses
from dflash_trt.serving.server.tritonserver import TritonServerBinary
from tests.cli.conftest import Run
from tests.serving.client import (
    CLASSIC,
    LLM,
    ask_grpc,
    make_fields,
)
from tests.serving.conftest import Generate
from tests.serving.served import PROMPTS, Served, serving
from tests.waiting import PATIENCE_S


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

"""A bundle with paged caches, served: what a prompt had in common with one before is told."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from dflash_trt.bundle.bundle import load_tokenizer, open_bundle
from dflash_trt.cli.main import main
from dflash_trt.serving.server.tritonserver import TritonServerBinary
from tests.cli.conftest import Run
from tests.serving.client import CLASSIC, LLM, ask_grpc, make_fields
from tests.serving.served import PROMPTS, Served, serving
from tests.waiting import PATIENCE_S

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
    assert f"{hit} prompt tokens from shared pages, 0 preemptions" in shown.err
    record = run("generate", "--url", paged.grpc, *common, "--json").json
    assert (record["cached_prompt_tokens"], record["preemptions"]) == (hit, 0)

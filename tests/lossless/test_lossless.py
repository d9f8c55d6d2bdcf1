"""Rung 2: through the whole runtime, speculation changes no bit of any logit and no token."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest

from dflash_trt.backends.base import Executor
from dflash_trt.backends.registry import open_executor
from dflash_trt.bundle.bundle import Bundle, load_tokenizer, open_bundle
from dflash_trt.cli.main import main
from dflash_trt.runtime import (
    Generator,
    GeneratorOptions,
    Request,
    RequestResult,
    SamplingParams,
    total,
)
from dflash_trt.text.prompts import read_prompts
from tests.covering import exhaustive
from tests.lossless.runs import (
    OUTPUT,
    assert_same,
    check_copied_prefix,
    check_groups,
    count_tokens,
    make_requests,
    run,
    run_baseline,
    run_traffic,
)
from tests.pairs import TWO_KINDS, PairFactory

BATCHES = (1, 4, 8)
BLOCKS = (2, 3, 5, 8)
CHUNKS = (5, 17, 64)
EXTRA = {
    "gemma4": {"num_layers": 4, "tie": True},
    "gemma4_moe": {"num_layers": 4, "tie": True, "experts": 4, "chosen": 2, "dtype": "bfloat16"},
    "gpt_oss": {"num_layers": 4, "experts": 4, "chosen": 2, "mxfp4": True, "rope": "yarn"},
}
NVFP4 = {owner: {"algorithm": "NVFP4"} for owner in ("target", "draft")}


@dataclass(frozen=True, slots=True)
class Case:
    """An opened pair, its requests, and what target_only makes of each alone."""

    executor: Executor
    requests: list[Request]
    expected: list[RequestResult]


@pytest.fixture(scope="module")
def demo_bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = tmp_path_factory.mktemp("demo") / "bundle"
    assert main(["build", "--target", "demo", "-o", str(folder)]) == 0
    return open_bundle(folder)


@pytest.fixture(
    scope="module",
    params=[
        "qwen3",
        "demo",
        "gpt_oss",
        exhaustive("llama"),
        exhaustive("qwen2"),
        exhaustive("mistral"),
        exhaustive("gemma3"),
        exhaustive("gemma4"),
        exhaustive("gemma4_moe"),
        exhaustive("nvfp4"),
    ],
)
def case(request: pytest.FixtureRequest, make_pair: PairFactory, demo_bundle: Bundle) -> Case:
    if request.param == "demo":
        bundle = demo_bundle
    else:
        is_quantized = request.param == "nvfp4"
        bundle = make_pair(
            "qwen3" if is_quantized else request.param,
            {"vocab": 64, **EXTRA.get(request.param, {})},
            TWO_KINDS,
            fit_steps=60,
            max_batch=8,
            quantize=NVFP4 if is_quantized else None,
        ).bundle
    executor = open_executor(bundle, threads=1)
    requests = make_requests(bundle.manifest.target.vocab_size, 8)
    return Case(executor, requests, run_baseline(executor, requests))


def test_a_prefix_is_copied_not_computed(make_pair: PairFactory) -> None:
    built = make_pair("qwen3", {"vocab": 64}, TWO_KINDS, fit_steps=60, max_batch=8)
    check_copied_prefix(built.open())


@pytest.mark.covering(1)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(("block", "chunk"), [(2, 17), (3, 5), (5, 64), (8, 17)])
def test_greedy_speculation_keeps_every_bit(case: Case, batch: int, block: int, chunk: int) -> None:
    """8 prompts × 72 tokens × 12 settings × 8 pairs: 55,296 greedy tokens, a part of it daily."""
    options = {"block_size": block, "prefill_chunk": chunk}
    check_groups(case.executor, case.requests, case.expected, batch, **options)


@pytest.mark.covering(1)
@pytest.mark.parametrize("batch", [4, 8])
def test_batching_the_baseline_keeps_every_bit(case: Case, batch: int) -> None:
    options = {"speculation": False, "prefill_chunk": 13}
    check_groups(case.executor, case.requests, case.expected, batch, **options)


@pytest.mark.parametrize("seed", [0, *map(exhaustive, range(1, 8))])
def test_admissions_and_cancellations_in_flight_keep_every_bit(case: Case, seed: int) -> None:
    """Requests come and go at random; whatever a request has said is what it says alone."""
    rng = random.Random(seed)
    options = GeneratorOptions(
        record_logits=True, block_size=rng.choice(BLOCKS), prefill_chunk=rng.choice(CHUNKS)
    )
    generator = Generator(case.executor, options=options)
    results = run_traffic(generator, case.requests, case.expected, rng)
    assert count_tokens(results) > OUTPUT


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=1.0, seed=3),
        SamplingParams(temperature=0.7, top_k=20, top_p=0.9, seed=2**63 + 5),
    ],
)
def test_a_seed_gives_the_same_tokens_with_speculation_on_or_off(
    case: Case, sampling: SamplingParams
) -> None:
    requests = [replace(request, sampling=sampling) for request in case.requests]
    expected = run_baseline(case.executor, requests)
    for block in (3, 8):
        check_groups(case.executor, requests, expected, 8, block_size=block)
    greedy = [result.token_ids for result in case.expected]
    assert any(result.token_ids != tokens for result, tokens in zip(expected, greedy, strict=True))


@pytest.mark.exhaustive
def test_accepted_drafts_of_every_count_keep_every_bit(demo_bundle: Bundle) -> None:
    """Random prompts accept few drafts; the demo's own accept every count from 0 to 7."""
    executor = open_executor(demo_bundle, threads=1)
    assert demo_bundle.prompts is not None
    tokenizer = load_tokenizer(demo_bundle)
    requests = [
        Request(prompt_ids=tuple(tokenizer.encode(text)), max_tokens=256)
        for text in read_prompts(demo_bundle.prompts)
    ]
    expected = run_baseline(executor, requests)
    results = run(executor, requests)
    for want, got in zip(expected, results, strict=True):
        assert_same(want, got, "demo prompts, batch 8")
    histogram = total(result.statistics for result in results).acceptance_histogram
    assert len(histogram) == 8 and all(histogram), histogram

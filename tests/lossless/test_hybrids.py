"""Rung 2 for hybrids: states that are replayed change no bit, whatever was rejected or moved."""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np
import pytest

from dflash_trt.backends.base import Scores, TargetCall
from dflash_trt.backends.onnxruntime.caches import RecurrentStates
from dflash_trt.backends.onnxruntime.executor import OnnxRuntimeExecutor
from dflash_trt.backends.registry import open_executor
from dflash_trt.backends.state_positions import StatePositions
from dflash_trt.replay import Answer, Replay
from dflash_trt.runtime import Generator, GeneratorOptions, Request, RequestResult, SamplingParams
from tests.covering import exhaustive
from tests.inspection import poison_all_free_pages
from tests.lossless.hybrid_campaign import run_campaign
from tests.lossless.runs import (
    OUTPUT,
    assert_same,
    check_groups,
    check_shared_prefix,
    count_tokens,
    finish,
    make_requests,
    run,
    run_baseline,
    run_traffic,
)
from tests.pairs import FIT_PROMPTS, TWO_KINDS, PairFactory, TinyPair

PAIR: dict[str, Any] = {
    "target": {"vocab": 64, "num_layers": 4, "head_dim": 32},
    "draft": {**TWO_KINDS, "block_size": 16, "target_layer_ids": [0, 1, 3]},
    "fit_steps": 60,
    "max_seq_len": 192,
    "max_batch": 8,
}
SAMPLED = SamplingParams(temperature=0.7, top_k=20, seed=11)


def draw_prompt(length: int, seed: int | random.Random = 7) -> tuple[int, ...]:
    rng = random.Random(seed) if isinstance(seed, int) else seed
    return tuple(rng.randrange(2, 62) for _ in range(length))


TARGETS: dict[str, dict[str, Any]] = {
    "dense": {"family": "qwen3_5"},
    "mixture": {"family": "qwen3_5_moe"},
    "nvfp4": {
        "family": "qwen3_5",
        "quantize": {"target": {"algorithm": "NVFP4", "exclude": ["lm_head", "mtp*"]}},
    },
    "mixture-fp8": {
        "family": "qwen3_5_moe",
        "quantize": {"target": {"algorithm": "FP8", "exclude": ["lm_head", "mtp*", "*.experts.*"]}},
    },
    "gemma-fp8": {
        "family": "gemma4_moe",
        "target": {"vocab": 64, "num_layers": 4, "experts": 4, "tie": True},
        "quantize": {"target": {"algorithm": "FP8", "exclude": ["lm_head", "mtp*", "*.experts.*"]}},
    },
}


@pytest.fixture(scope="module", params=["dense", exhaustive("mixture")])
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {**PAIR, **TARGETS[request.param]}


@pytest.fixture(scope="module")
def built(make_pair: PairFactory, options: dict[str, Any]) -> TinyPair:
    return make_pair(**options)


@pytest.fixture(scope="module")
def executor(built: TinyPair) -> OnnxRuntimeExecutor:
    return built.open()


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    """Of the last two, drafts are accepted in runs of every length."""
    fitted = [
        Request(prompt_ids=tuple(prompt), max_tokens=OUTPUT, ignore_eos=True)
        for prompt in FIT_PROMPTS
    ]
    return [*make_requests(64, 6), *fitted]


@pytest.fixture(scope="module")
def expected(executor: OnnxRuntimeExecutor, requests: list[Request]) -> list[RequestResult]:
    return run_baseline(executor, requests)


@pytest.mark.parametrize(
    ("batch", "block", "chunk"),
    [
        (8, 16, 17),
        *(
            exhaustive(*one)
            for one in ((1, 5, 64), (1, 16, 5), (3, 2, 64), (8, 3, 5), (8, 8, 64), (8, 13, 1))
        ),
    ],
)
def test_speculation_keeps_every_bit(
    executor: OnnxRuntimeExecutor,
    requests: list[Request],
    expected: list[RequestResult],
    batch: int,
    block: int,
    chunk: int,
) -> None:
    check_groups(executor, requests, expected, batch, block_size=block, prefill_chunk=chunk)


def test_drafts_are_accepted_in_part(
    executor: OnnxRuntimeExecutor, requests: list[Request]
) -> None:
    """Else the tests here would never replay a part of a block."""
    lengths = set[int]()
    for result in run(executor, requests[-2:]):
        histogram = result.statistics.acceptance_histogram
        lengths |= {length for length, count in enumerate(histogram) if count}
    assert len(lengths) >= 4, lengths


@pytest.mark.parametrize("seed", [0, *map(exhaustive, range(1, 6))])
def test_any_traffic_keeps_every_bit(
    executor: OnnxRuntimeExecutor,
    requests: list[Request],
    expected: list[RequestResult],
    seed: int,
) -> None:
    """Admissions, cancellations and the moves of slots that follow them."""
    rng = random.Random(seed)
    options = GeneratorOptions(
        record_logits=True, block_size=rng.choice([2, 5, 16]), prefill_chunk=rng.choice([5, 64])
    )
    results = run_traffic(
        Generator(executor, options=options), requests, expected, rng, cancels=0.04
    )
    assert count_tokens(results) > 5 * OUTPUT


@pytest.mark.parametrize("sampling", [SAMPLED, exhaustive(SamplingParams())], ids=str)
def test_preemption_keeps_every_bit(
    built: TinyPair, make_pair: PairFactory, options: dict[str, Any], sampling: SamplingParams
) -> None:
    """Attention in pages, states in slots; who is preempted computes both again."""
    requests = make_requests(64, 6, sampling)
    expected = run_baseline(built.open(), requests)
    paging = {"page_size": 8, "pages": 30}
    paged = open_executor(make_pair(**options, paging=paging).bundle, threads=1)
    generator = Generator(paged, options=GeneratorOptions(record_logits=True, prefill_chunk=17))
    for request in requests:
        generator.submit(request)
    results = finish(generator, lambda running: poison_all_free_pages(running, paged))
    for index, (want, got) in enumerate(zip(expected, results, strict=True)):
        assert_same(want, got, f"request {index}")
    assert sum(result.statistics.preemptions for result in results) > 1


def test_linear_caches_share_no_prefix(executor: OnnxRuntimeExecutor) -> None:
    """Copied rows would leave a state behind: every prompt is computed."""
    request = Request(prompt_ids=draw_prompt(60), max_tokens=12, ignore_eos=True)
    (want,) = run(executor, [request])
    for got in run(executor, [request, request]):
        assert_same(want, got, "the same prompt again")
        assert not got.statistics.cached_prompt_tokens


@pytest.mark.parametrize("chunk", [24, *map(exhaustive, (5, 17, 512))])
def test_a_prefix_comes_with_its_state(
    built: TinyPair, make_pair: PairFactory, options: dict[str, Any], chunk: int
) -> None:
    """Ten pages, then tails: acceptance too is the same."""
    paged = open_executor(make_pair(**options, paging={"page_size": 8}).bundle, threads=1)
    check_shared_prefix(built.open(), paged, (1, 3, 8, 9, 20), prefill_chunk=chunk)


@pytest.mark.parametrize("max_batch", [1, exhaustive(4)])
def test_prompts_share_up_to_where_they_part(
    built: TinyPair, make_pair: PairFactory, options: dict[str, Any], max_batch: int
) -> None:
    """The second one finds out where that is. A prompt of whole pages leaves its last to run."""
    shape = {**options, "max_batch": max_batch, "paging": {"page_size": 8, "pages": 80}}
    paged = open_executor(make_pair(**shape).bundle, threads=1)
    generator = Generator(paged, options=GeneratorOptions(record_logits=True, prefill_chunk=64))
    stem = draw_prompt(80)
    prompts = [(*stem, *draw_prompt(9, seed=each)) for each in range(3)]
    cached = []
    for prompt in (*prompts, stem, stem):
        request = Request(prompt_ids=prompt, max_tokens=12, ignore_eos=True)
        (want,) = run_baseline(built.open(), [request])
        (got,) = generator.generate([request])
        assert_same(want, got, f"{len(prompt)} tokens")
        cached.append(got.statistics.cached_prompt_tokens)
    assert cached[0] == 0 and cached[2] == 80 and cached[4] == 72, cached


def test_a_turn_goes_on_behind_the_last_output(
    built: TinyPair, make_pair: PairFactory, options: dict[str, Any]
) -> None:
    """Of an output one copy is kept, of its last page that ended in a step's rows."""
    paged = open_executor(make_pair(**options, paging={"page_size": 8}).bundle, threads=1)
    first = Request(prompt_ids=draw_prompt(20), max_tokens=60, ignore_eos=True)
    (answer,) = run(paged, [first])
    generator = Generator(paged, options=GeneratorOptions(record_logits=True))
    (again,) = generator.generate([first])
    assert_same(answer, again, "alone")
    turn = Request(
        prompt_ids=(*first.prompt_ids, *answer.token_ids, 9, 8), max_tokens=12, ignore_eos=True
    )
    (want,) = run_baseline(built.open(), [turn])
    neighbour = Request(prompt_ids=draw_prompt(30, seed=1), max_tokens=40, ignore_eos=True)
    _, got = generator.generate([neighbour, turn])
    assert_same(want, got, "the next turn")
    cached = got.statistics.cached_prompt_tokens
    assert cached is not None and 64 <= cached < 80, "the last page may have ended the output"


def test_a_prefix_with_another_state_would_be_noticed(
    built: TinyPair,
    make_pair: PairFactory,
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    paged = open_executor(make_pair(**options, paging={"page_size": 8}).bundle, threads=1)
    monkeypatch.setattr(RecurrentStates, "restore", _restore_nothing)
    with pytest.raises(AssertionError):
        check_shared_prefix(built.open(), paged, (9, 20))


def _restore_nothing(states: RecurrentStates, copy: int, slot: int) -> None:
    """Where a state ends, and none of it."""
    StatePositions.move(states, states.slots + copy, slot)


@pytest.mark.parametrize("seed", [0, *map(exhaustive, range(1, 6))])
def test_any_traffic_over_shared_prefixes_keeps_every_bit(
    built: TinyPair, make_pair: PairFactory, options: dict[str, Any], seed: int
) -> None:
    """Fewer copies than prefixes, pages that are taken back, preemption, moved slots."""
    rng = random.Random(seed)
    stems = [draw_prompt(rng.randrange(20, 70), seed=each) for each in range(2)]
    requests = [
        Request(
            prompt_ids=(
                *stem[: rng.randrange(9, len(stem))],
                *draw_prompt(rng.randrange(1, 9), rng),
            ),
            max_tokens=rng.randrange(8, 40),
            ignore_eos=True,
        )
        for stem in stems * 8
    ]
    expected = run_baseline(built.open(), requests)
    shape = {**options, "max_batch": 3, "paging": {"page_size": 8, "pages": 40}}
    paged = open_executor(make_pair(**shape).bundle, threads=1)
    settings = GeneratorOptions(record_logits=True, prefill_chunk=rng.choice([13, 24, 64]))
    results = run_traffic(Generator(paged, options=settings), requests, expected, rng, cancels=0.02)
    cached = [result.statistics.cached_prompt_tokens or 0 for result in results]
    assert sum(map(bool, cached)) > 3


@pytest.mark.exhaustive
def test_a_minute_of_random_traffic_keeps_every_bit(make_pair: PairFactory) -> None:
    """Dense and mixtures, linear and paged; perf/results has a run of 2,160 sequences."""
    ends = time.monotonic() + 60
    met = run_campaign(make_pair, 7, lambda met: time.monotonic() < ends)
    assert met.sequences > 50 and met.counts["drafts rejected"] < met.counts["drafts"]


def test_prompt_lookup_keeps_every_bit(
    executor: OnnxRuntimeExecutor,
    requests: list[Request],
    expected: list[RequestResult],
) -> None:
    check_groups(executor, requests[:4], expected, 4, drafter="prompt-lookup")


def test_rows_that_a_state_has_taken_cannot_run_again(built: TinyPair) -> None:
    """A block of them may, the beginning may; a slot whose call broke off can only begin anew."""
    executor, ids = built.open(), np.arange(2, 42, dtype=np.int64)[None]
    first, again = _call(executor, ids, 0), _call(executor, ids[:, 30:], 30)
    np.testing.assert_array_equal(first[:, 30:], again)
    with pytest.raises(ValueError, match="slot 0 can go on at 30 … 40 or 0, not at 29"):
        _call(executor, ids[:, 29:], 29)
    with pytest.raises(ValueError, match="not at 41"):
        _call(executor, ids[:, :1], 41)
    np.testing.assert_array_equal(first, _call(executor, ids, 0))
    executor.states.lose(range(1))
    with pytest.raises(ValueError, match="not at 40"):
        _call(executor, ids[:, :1], 40)
    np.testing.assert_array_equal(first, _call(executor, ids, 0))


def _call(executor: OnnxRuntimeExecutor, ids: Any, start: int) -> Any:
    """Logits of rows of slot 0."""
    picked = np.arange(ids.shape[1])[None]
    call = TargetCall("target", 0, ids, np.array([start]), picked, Scores.LOGITS)
    logits = executor.forward(call).logits
    assert logits is not None
    return logits.copy()


def test_replayed_answers_count_what_decoding_counted(
    built: TinyPair, executor: OnnxRuntimeExecutor, requests: list[Request]
) -> None:
    """What `diagnose` and `train-draft` measure with: chunks of a prompt, states in between."""
    results = run(executor, requests)
    answers = [
        Answer(request.prompt_ids, result.token_ids)
        for request, result in zip(requests, results, strict=True)
    ]
    with Replay(built.bundle, sequences=3) as replay:
        measured = replay.measure(answers)
    for want, got in zip(results, measured.per_answer, strict=True):
        assert got.acceptance_histogram == want.statistics.acceptance_histogram
    assert measured.acceptance_length is not None and measured.acceptance_length > 1


@pytest.mark.parametrize(
    "target", ["mixture", *map(exhaustive, ("nvfp4", "mixture-fp8", "gemma-fp8"))]
)
def test_other_linears_beside_states_keep_every_bit(make_pair: PairFactory, target: str) -> None:
    """Experts that rows choose and one that all share, in pages, with a draft of YaRN as published;
    and linears that round what they read.

    The tests above have exhaustive cases of such experts, fitted and linear.
    """
    draft = {**PAIR["draft"], "rope": "yarn64", "block_size_place": "dflash_config"}
    pair = {**PAIR, "draft": draft, "fit_steps": 0, "paging": {"page_size": 8}}
    executor = open_executor(make_pair(**pair | TARGETS[target]).bundle, threads=2)
    requests = make_requests(64, 3)[1:]
    expected = run_baseline(executor, requests)
    check_groups(executor, requests, expected, 2, block_size=5, prefill_chunk=17)

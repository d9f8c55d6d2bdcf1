"""What applications ask for, pair by pair: no answer depends on drafts, neighbours or pages.

Every day over an executor whose logits are a function of the tokens; in the exhaustive tests over
a pair's own graphs, linear and paged, to the last bit.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest

from dflash_trt.backends.base import Executor
from dflash_trt.backends.registry import open_executor
from dflash_trt.core.limits import PagePool
from dflash_trt.decoding import (
    Generator,
    GeneratorOptions,
    Request,
    RequestResult,
    SamplingParams,
)
from dflash_trt.sampling.token_rules import TokenRules
from dflash_trt.text.grammar import Grammar, GrammarCompiler
from tests.covering import exhaustive
from tests.pairs import PairFactory
from tests.standins.executor import FakeExecutor, PagedFakeExecutor
from tests.text.tokenizers import make_plain

CORE = make_plain("<end>")
END, VOCAB = CORE.token_to_id("<end>"), CORE.get_vocab_size() + 2
OUTPUT, LENGTH = 40, 192
BASES = {
    "greedy": SamplingParams(),
    "drawn": SamplingParams(temperature=0.9, seed=3),
    "narrow": SamplingParams(temperature=1.1, top_k=50, top_p=0.95, seed=8),
}


def grammar() -> Any:
    return GrammarCompiler(CORE, VOCAB, [END]).compile(Grammar("regex", "[a-f ,.0-9]{30,36}"))


FEATURES: dict[str, Callable[[Request], Request]] = {
    "grammar": lambda one: replace(one, grammar=grammar(), ignore_eos=False),
    "penalties": lambda one: replace(
        one, penalties=replace(one.penalties, frequency=0.6, presence=0.3, repetition=1.2)
    ),
    "bias": lambda one: replace(
        one, penalties=replace(one.penalties, bias=((70, 4.0), (68, 3.0), (5, -100.0)))
    ),
    "rules": lambda one: replace(one, rules=TokenRules(bad=((66,), (67, 67), (1, 2, 3)))),
    "logprobs": lambda one: replace(one, logprobs=3),
    "processed": lambda one: replace(one, logprobs=2, logprobs_mode="processed_logprobs"),
    "min_p": lambda one: replace(one, sampling=replace(one.sampling, min_p=0.1)),
    "seed": lambda one: replace(one, sampling=replace(one.sampling, seed=one.sampling.seed + 1)),
}
PAIRS = list(combinations(FEATURES, 2))


def make_requests(sampling: SamplingParams) -> list[Request]:
    """One for each pair of features; some share a prompt, as the samples of `n` do."""
    rng = random.Random(2)
    prompts = [tuple(rng.randrange(VOCAB - 3) for _ in range(length)) for length in (3, 20, 41)]
    requests = []
    for number, pair in enumerate(PAIRS):
        one = Request(
            prompt_ids=prompts[number % 3], max_tokens=OUTPUT, sampling=sampling, ignore_eos=True
        )
        for name in pair:
            one = FEATURES[name](one)
        requests.append(one)
    return requests


def run(executor: Executor, requests: list[Request], **options: Any) -> list[RequestResult]:
    settings = GeneratorOptions(record_logits=True, **options)
    return Generator(executor, options=settings, eos_token_ids=[END]).generate(requests)


def assert_same(name: str, expected: list[RequestResult], got: list[RequestResult]) -> None:
    for pair, one, other in zip(PAIRS, expected, got, strict=True):
        where = f"{name}: {pair}"
        assert one.token_ids == other.token_ids, where
        assert one.finish_reason == other.finish_reason and one.logprobs == other.logprobs, where
        np.testing.assert_array_equal(one.logits, other.logits, where)


def check_all(make: Callable[[int, bool], Executor], sampling: SamplingParams) -> None:
    """Alone without drafts, alone, 8 at a time, and over pages of which there are too few."""
    requests = make_requests(sampling)
    alone = make(1, False)
    expected = [run(alone, [one], speculation=False)[0] for one in requests]
    assert_same("alone", expected, [run(alone, [one])[0] for one in requests])
    assert_same("batch 8", expected, run(make(8, False), requests))
    paged = run(make(8, True), requests)
    assert_same("paged", expected, paged)
    assert sum(one.statistics.preemptions for one in paged) > 0
    assert sum(one.statistics.accepted_tokens for one in paged) > 0
    for pair, one in zip(PAIRS, expected, strict=True):
        if "grammar" in pair:
            text = CORE.decode(list(one.token_ids))
            assert one.finish_reason == "stop" and set(text) <= set("abcdef ,.0123456789")
        if "rules" in pair:
            assert 66 not in one.token_ids


@pytest.mark.parametrize("base", ["drawn", *map(exhaustive, ("greedy", "narrow"))])
def test_no_answer_depends_on_how_it_is_decoded(base: str) -> None:
    def make(slots: int, is_paged: bool) -> Executor:
        sizes: dict[str, Any] = {"max_batch": slots, "max_seq_len": LENGTH, "vocab_size": VOCAB}
        if is_paged:
            return PagedFakeExecutor(PagePool(page_size=8, pages=24), **sizes)
        return FakeExecutor(**sizes)

    check_all(make, BASES[base])


@pytest.mark.exhaustive
@pytest.mark.parametrize("base", ["greedy", "drawn"])
def test_nor_does_a_bit_of_a_pairs_own_logits(base: str, make_pair: PairFactory) -> None:
    target: dict[str, Any] = {"vocab": VOCAB}

    def make(slots: int, is_paged: bool) -> Executor:
        more = {"paging": {"page_size": 8, "pages": 26}} if is_paged else {}
        built = make_pair("qwen3", target, fit_steps=60, max_batch=8, max_seq_len=LENGTH, **more)
        return open_executor(built.bundle, threads=1)

    check_all(make, BASES[base])

"""Requests with ragged prompts, their runs, and the comparison of two runs to the bit."""

from __future__ import annotations

import random

from dflash_trt.backends.base import Executor
from dflash_trt.runtime import (
    Generator,
    GeneratorOptions,
    Request,
    RequestResult,
    SamplingParams,
)
from tests.reference.compare import assert_bitwise_equal

OUTPUT = 72


def make_requests(vocab: int, count: int, sampling: SamplingParams | None = None) -> list[Request]:
    """Ragged prompts of 1 … 90 tokens."""
    rng = random.Random(count)
    lengths = [1, 2, 90, *(rng.randint(1, 90) for _ in range(count - 3))]
    return [
        Request(
            prompt_ids=tuple(rng.randrange(2, vocab - 1) for _ in range(length)),
            max_tokens=OUTPUT,
            sampling=sampling or SamplingParams(),
            ignore_eos=True,
        )
        for length in lengths
    ]


def run(executor: Executor, requests: list[Request], **options: object) -> list[RequestResult]:
    settings = GeneratorOptions(record_logits=True, **options)  # type: ignore[arg-type]
    return Generator(executor, options=settings).generate(requests)


def run_baseline(executor: Executor, requests: list[Request]) -> list[RequestResult]:
    return [run(executor, [request], speculation=False)[0] for request in requests]


def assert_same(expected: RequestResult, actual: RequestResult, name: str) -> None:
    assert actual.token_ids == expected.token_ids, name
    assert expected.logits is not None and actual.logits is not None
    assert_bitwise_equal(actual.logits, expected.logits, name)

"""Rung 2: drafts that a sequence's own text gives change no bit of any logit."""

from __future__ import annotations

import random
from typing import Any

import pytest

from dflash_trt.backends.base import Executor
from dflash_trt.backends.registry import open_executor
from dflash_trt.runtime import Generator, GeneratorOptions, Request, SamplingParams
from dflash_trt.runtime.drafters import NgramIndex
from dflash_trt.speculation.drafters import PROMPT_LOOKUP
from tests.lossless.runs import check_groups, make_requests, run_baseline
from tests.pairs import PairFactory

SLOTS = 8


PAIR: dict[str, Any] = {"family": "qwen3", "target": {"vocab": 64}, "fit_steps": 60}
LAYOUTS = {"linear": None, "paged": {"page_size": 8, "pages": 61}}


@pytest.fixture(scope="module", params=LAYOUTS)
def executor(request: pytest.FixtureRequest, make_pair: PairFactory) -> Executor:
    """Linear caches, or pages for two and a half of the eight sequences that may run."""
    paging = LAYOUTS[request.param]
    more = {} if paging is None else {"paging": paging}
    pair = make_pair(**PAIR, max_batch=SLOTS, max_seq_len=192, **more)
    return open_executor(pair.bundle, threads=1)


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "sampling",
    [SamplingParams(), SamplingParams(temperature=0.8, seed=5)],
    ids=["greedy", "drawn"],
)
def test_what_is_looked_up_keeps_every_bit(executor: Executor, sampling: SamplingParams) -> None:
    requests = make_requests(64, SLOTS, sampling)
    expected = run_baseline(executor, requests)
    for batch, live in ((1, False), (SLOTS, False), (SLOTS, True)):
        check_groups(executor, requests, expected, batch, drafter=PROMPT_LOOKUP, live=live)


def test_a_text_that_repeats_is_drafted_and_one_without_is_not(executor: Executor) -> None:
    generator = Generator(executor, options=GeneratorOptions(drafter=PROMPT_LOOKUP))
    (new,) = generator.generate([Request(prompt_ids=(5,), max_tokens=2, ignore_eos=True)])
    assert new.statistics.steps == 1 and new.statistics.drafted_tokens == 0
    prompt = [random.Random(1).randrange(2, 60) for _ in range(20)]
    (plain,) = generator.generate([Request(prompt_ids=tuple(prompt), max_tokens=2)])
    # The same prompt behind itself and its answer ends in an n-gram that was followed.
    ids = (*prompt, *plain.token_ids, *range(2, 60), *prompt)
    (again,) = generator.generate([Request(prompt_ids=ids, max_tokens=60, ignore_eos=True)])
    assert again.statistics.drafted_tokens > 0


def test_the_longest_and_latest_match_goes_on() -> None:
    index = NgramIndex()
    index.extend([1, 2, 3, 9, 2, 3, 8, 1, 2, 3])
    assert index.propose(3) == [9, 2, 3], "1 2 3 is longer than the later 2 3"
    index.extend([4, 5, 2, 3])
    assert index.propose(2) == [4, 5], "the latest of three"
    index.extend([7, 2, 3])
    assert index.propose(5) == [7, 2, 3, 7, 2], "what ends goes round"
    index.extend([6])
    assert index.propose(5) == []

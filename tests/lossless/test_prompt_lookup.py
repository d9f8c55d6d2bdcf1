"""Drafts that a sequence's own text gives; test_lossless.py has the bits of what is said."""

from __future__ import annotations

import random

from dflash_trt.decoding import Generator, GeneratorOptions, Request
from dflash_trt.decoding.drafter_kinds import PROMPT_LOOKUP
from dflash_trt.decoding.drafters import NgramIndex
from tests.pairs import PairFactory


def test_a_text_that_repeats_is_drafted_and_one_without_is_not(make_pair: PairFactory) -> None:
    executor = make_pair("qwen3", {"vocab": 64}, max_seq_len=192).open()
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

"""Metrics on hand-made rows, and the walk over drafts against a literal speculative loop."""

from __future__ import annotations

from random import Random

import pytest

from dflash_trt.training.demo.evaluate import accepted_lengths, distinct_ngrams


def test_distinct_ngrams() -> None:
    assert distinct_ngrams([list(range(10))]) == 1.0
    assert distinct_ngrams([[1] * 9, [1] * 9]) == 0.25
    assert distinct_ngrams([[1, 2]]) == 0.0


@pytest.mark.parametrize("seed", range(5))
def test_accepted_lengths_follow_the_loop(seed: int) -> None:
    rng = Random(seed)
    row = [rng.randrange(2) for _ in range(200)]
    drafts = [[rng.randrange(2) for _ in range(7)] for _ in row]
    expected, anchor = [], 10
    while anchor + 8 <= len(row):
        emitted = 1
        while emitted <= 7 and drafts[anchor][emitted - 1] == row[anchor + emitted]:
            emitted += 1
        expected.append(emitted)
        anchor += emitted
    assert accepted_lengths(row, drafts, 10) == expected

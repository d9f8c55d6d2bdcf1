"""Answers that repeat themselves."""

from __future__ import annotations

import pytest

from dflash_trt.decoding.loops import LOOP_TIMES, LOOP_TOKENS, is_looping, loop_end

EIGHT = [5, 1, 4, 2, 8, 5, 7, 1]


@pytest.mark.parametrize(
    ("token_ids", "expected"),
    [
        ([], False),
        (list(range(1000)), False),
        ([1] * (LOOP_TIMES * LOOP_TOKENS - 1), False),  # overlaps do not count
        ([1] * (LOOP_TIMES * LOOP_TOKENS), True),
        ([1, 2] * 11 + [1], False),
        ([1, 2] * 12, True),
        ([*EIGHT, 11, *EIGHT, 12, 13], False),
        ([*EIGHT, 11, *EIGHT, 12, 13, *EIGHT], True),
        ([*EIGHT, 11, *EIGHT, 12, 13, *EIGHT[:7]], False),
        ([*EIGHT[:7], 10, *EIGHT[:7], 11, *EIGHT[:7], 12], False),
    ],
)
def test_the_same_run_of_tokens_three_times_apart(token_ids: list[int], expected: bool) -> None:
    assert is_looping(token_ids) is expected
    assert is_looping([99, *token_ids, 98]) is expected
    assert loop_end([*token_ids, 97]) == (len(token_ids) if expected else None)

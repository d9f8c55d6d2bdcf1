"""Penalties, biases and rules: what they make of a row, and what they refuse."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_trt.core.masks import TokenMask
from dflash_trt.errors import DflashError
from dflash_trt.sampling.penalties import Penalties, PenaltyState
from dflash_trt.sampling.token_rules import Ruled, TokenRules


def test_a_row_is_changed_as_openai_defines_it() -> None:
    logits = np.linspace(-3, 3, 11, dtype=np.float32)
    counts = Counter([4, 4, 4, 7])
    made = Penalties(frequency=0.5, presence=-0.25, bias=((7, 2.0), (0, -100)))
    expected = logits.astype(np.float64)
    for token in range(11):
        expected[token] -= counts[token] * 0.5 + (counts[token] > 0) * -0.25
    expected[7] += 2
    expected[0] -= 100
    before = logits.copy()
    state = PenaltyState(made, [0, 10, 10], counts.elements())
    np.testing.assert_allclose(state.apply(logits), expected, rtol=1e-6)
    np.testing.assert_array_equal(logits, before)
    assert Penalties().is_neutral and not made.is_neutral
    again = PenaltyState(Penalties(repetition=1.5), [0, 10, 10], counts.elements()).apply(logits)
    for token in (0, 4, 7, 10):
        before[token] *= 1 / 1.5 if before[token] > 0 else 1.5
    np.testing.assert_allclose(again, before, rtol=1e-6)
    unchanged = PenaltyState(Penalties(frequency=1.0), [3]).apply(logits)
    np.testing.assert_array_equal(unchanged, logits)


@given(
    prompt=st.lists(st.integers(0, 9), min_size=1, max_size=12),
    output=st.lists(st.integers(0, 9), max_size=12),
    numbers=st.tuples(*[st.floats(-2, 2, width=16)] * 2, st.sampled_from([0.5, 1.0, 1.5])),
    temperature=st.sampled_from([0.5, 1.0, 2.0]),
)
@settings(max_examples=100, deadline=None)
def test_the_prompt_counts_where_it_is_to(
    prompt: list[int], output: list[int], numbers: tuple[float, float, float], temperature: float
) -> None:
    """TensorRT-LLM's penalties, which act on what the temperature has divided, written down."""
    presence, frequency, repetition = numbers
    logits = np.linspace(-4, 5, 10, dtype=np.float32)
    made = Penalties(
        frequency=frequency,
        presence=presence,
        repetition=repetition,
        counts_prompt=True,
        scale=temperature,
    )
    got = PenaltyState(made, prompt, output).apply(logits) / temperature
    expected = logits.astype(np.float64) / temperature
    for token, times in Counter([*prompt, *output]).items():
        value = expected[token]
        value = value / repetition if value > 0 else value * repetition
        expected[token] = value - presence - frequency * times
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("fields", "piece"),
    [
        ({"frequency": 2.1}, "frequency_penalty: 2.1 is not a number from -2 to 2"),
        ({"presence": float("nan")}, "presence_penalty: nan"),
        ({"presence": True}, "presence_penalty: True"),
        ({"repetition": 1e-300}, "repetition_penalty: 1e-300 is not a number from 0.0001 to 10000"),
        ({"bias": ((3, 1e3),)}, "logit_bias: 1000.0 is not a number from -100 to 100"),
        ({"bias": ((-1, 1.0),)}, "logit_bias: -1 is no token id"),
        ({"bias": ((1, 1.0), (1, 2.0))}, "logit_bias: names a token twice"),
        ({"bias": tuple((i, 1.0) for i in range(1025))}, "names 1,025 tokens"),
    ],
)
def test_penalties_that_are_refused(fields: dict[str, Any], piece: str) -> None:
    with pytest.raises(DflashError, match=piece):
        Penalties(**fields)


def _ids(mask: TokenMask) -> list[int]:
    return [one for one in range(12) if mask.has(one)]


def test_a_word_of_several_tokens_is_bad_behind_its_beginning() -> None:
    rules = TokenRules(bad=((5,), (1, 2), (1, 2, 3)))
    assert rules.banned([]) == {5}
    assert rules.banned([1]) == {5, 2} == rules.banned([9, 1])
    assert rules.banned([1, 2]) == {5, 3}
    assert rules.banned([2, 1, 3]) == {5}
    ruled = Ruled(rules.mask(12), rules.banned([1]), None)
    tokens = ruled.tokens()
    assert [one for one in range(12) if ruled.allows(one)] == [0, 1, 3, 4, *range(6, 12)]
    assert _ids(tokens) == [0, 1, 3, 4, *range(6, 12)]


def test_both_kinds_and_a_grammar_hold_together() -> None:
    rules = TokenRules(allowed=(2, 3, 9), bad=((3,),))
    grammar = Ruled(TokenRules(allowed=(3, 9, 10)).mask(12), frozenset(), None)
    ruled = Ruled(rules.mask(12), rules.banned([]), grammar)
    assert _ids(ruled.tokens()) == [9]
    assert [one for one in range(12) if ruled.allows(one)] == [9]
    with pytest.raises(DflashError, match="no token may come next"):
        Ruled(TokenRules(allowed=(3,)).mask(12), frozenset([3]), None).tokens().apply(
            np.zeros(12, np.float32)
        )


@pytest.mark.parametrize(
    ("fields", "piece"),
    [
        ({"allowed": ()}, "allowed_token_ids: names 0 tokens, not 1 to 1,024"),
        ({"allowed": tuple(range(1025))}, "allowed_token_ids: names 1,025 tokens"),
        ({"allowed": (-1,)}, "allowed_token_ids: -1 is no token id"),
        ({"bad": ((True,),)}, "bad_words: True is no token id"),
        ({"bad": ((),)}, "bad_words: a word of 0 tokens has not 1 to 64"),
        ({"bad": ((1,) * 65,)}, "bad_words: a word of 65 tokens"),
        ({"bad": ((1,),) * 1025}, "bad_words: names 1,025 words"),
    ],
)
def test_rules_that_are_refused(fields: dict[str, Any], piece: str) -> None:
    with pytest.raises(DflashError, match=piece):
        TokenRules(**fields)

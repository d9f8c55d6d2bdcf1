"""Filters against their definition, draws against the law."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_trt.core.masks import TokenMask
from dflash_trt.decoding import SamplingParams, choose_tokens
from dflash_trt.errors import DflashError
from dflash_trt.sampling.choice import choose_candidate, choose_token
from dflash_trt.sampling.noise import draw_gumbel
from tests.covering import exhaustive
from tests.sampling.definitions import exact_law, pick_candidates

logit_rows = st.lists(
    st.floats(-30, 30, width=32) | st.sampled_from([0.0, 1.0, -np.inf]), min_size=1, max_size=40
).filter(lambda row: max(row) > -np.inf)


@given(
    row=logit_rows,
    temperature=st.sampled_from([5e-324, 1e-300, 0.01, 0.7, 1.0, 5.0, 1e30]),
    top_k=st.none() | st.integers(1, 50),
    top_p=st.floats(0.01, 1),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.5, 1.0]),
    seed=st.integers(0, 2**64 - 1),
    position=st.integers(0, 2**40),
)
@settings(max_examples=300, deadline=None)
def test_choice_is_the_full_argmax(
    row: list[float],
    temperature: float,
    top_k: int | None,
    top_p: float,
    min_p: float,
    seed: int,
    position: int,
) -> None:
    """What is skipped as unreachable never mattered."""
    logits = np.array(row, dtype=np.float32)
    params = SamplingParams(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed
    )
    allowed = exact_law(logits, params) > 0
    with np.errstate(over="ignore"):
        scaled = (logits.astype(np.float64) - float(logits.max())) / temperature
    scores = scaled + draw_gumbel(seed, position, np.arange(len(row)))
    chosen = int(choose_tokens(logits[None], np.array([position]), params)[0])
    assert allowed[chosen]
    assert chosen == int(np.argmax(np.where(allowed, scores, -np.inf)))


class Some:
    """Some tokens may come."""

    def __init__(self, flags: np.ndarray) -> None:
        self.mask = TokenMask(np.packbits(flags, bitorder="little"), len(flags), "grammar")

    def allows(self, token_id: int) -> bool:
        return self.mask.has(token_id)

    def tokens(self) -> TokenMask:
        return self.mask


def make_rows(vocab_size: int, seed: int) -> list[np.ndarray]:
    """Rows of every kind: flat, steep, of ties, of one winner, mostly of minus infinity."""
    rng = np.random.default_rng(seed)
    peak = rng.normal(0, 1, vocab_size)
    peak[rng.integers(vocab_size)] += 15
    bare = np.where(rng.random(vocab_size) < 0.95, -np.inf, rng.normal(0, 3, vocab_size))
    bare[7] = 0.0
    rows = [rng.normal(0, width, vocab_size) for width in (0.1, 1.0, 4.0)]
    rows += [np.zeros(vocab_size), np.round(rng.normal(0, 2, vocab_size)), peak, bare]
    return [row.astype(np.float32) for row in rows]


@pytest.mark.parametrize("vocab_size", [5003, exhaustive(4096), exhaustive(49_152)])
def test_long_rows_are_looked_at_in_part_alone(vocab_size: int) -> None:
    """The winner by the definition, from the noise and the rank of every token."""
    every = np.arange(vocab_size)
    filters = [
        {"temperature": temperature, **one}
        for temperature in (0.3, 1.0, 4.0)
        for one in ({}, {"top_k": 40}, {"top_p": 0.9}, {"min_p": 0.02, "top_p": 0.99})
    ]
    for seed, row in enumerate(make_rows(vocab_size, 3)):
        ranked = np.argsort(-row, kind="stable")
        for one in filters:
            params = SamplingParams(seed=seed, **one)
            scaled = (row.astype(np.float64) - float(row.max())) / params.temperature
            kept = ranked[scaled[ranked] >= (math.log(params.min_p) if params.min_p else -np.inf)]
            kept = kept[: params.top_k]
            reached = np.cumsum(np.exp(scaled[kept]))
            if params.top_p < 1:
                kept = kept[np.append(0, reached[:-1]) < params.top_p * reached[-1]]
            for position in (0, 91):
                scores = np.full(vocab_size, -np.inf)
                scores[kept] = scaled[kept] + draw_gumbel(seed, position, every)[kept]
                assert choose_token(row, position, params) == int(np.argmax(scores)), params


def test_what_is_allowed_is_chosen_from() -> None:
    """As from the row in which all else is minus infinity, of few tokens and of many."""

    rng = np.random.default_rng(5)
    rows = make_rows(50_000, 4)
    for share in (0.0001, 0.3, 0.95):
        flags = rng.random(50_000) < share
        flags[7] = True
        for position, row in enumerate(rows):
            masked = np.where(flags, row, np.float32(-np.inf))
            for one in (
                {},
                {"temperature": 0.9},
                {"temperature": 1.0, "top_p": 0.9},
                {"temperature": 1.0, "top_k": 40},
                {"temperature": 2.0, "min_p": 0.05, "top_p": 0.9},
            ):
                params = SamplingParams(seed=2, **one)
                chosen = choose_token(row, position, params, Some(flags))
                assert chosen == choose_token(masked, position, params) and flags[chosen]
    nothing = Some(np.zeros(50_000, np.bool_))
    for params in (SamplingParams(), SamplingParams(temperature=1.0)):
        with pytest.raises(DflashError, match="grammar: no token may come next"):
            choose_token(rows[0], 0, params, nothing)
        with pytest.raises(DflashError, match="position 3 are not finite"):
            forbidden = np.where(flags, np.float32(-np.inf), rows[1])
            choose_token(forbidden, 3, params, Some(flags))


@pytest.mark.parametrize("logits", [[np.nan, 1.0], [np.inf, 0.0], [-np.inf, -np.inf]])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_logits_are_an_error(logits: list[float], temperature: float) -> None:
    with pytest.raises(DflashError, match="position 12 are not finite") as caught:
        choose_tokens(
            np.array([[0.0, 1.0], logits], dtype=np.float32),
            np.array([11, 12]),
            SamplingParams(temperature=temperature),
        )
    assert caught.value.exit_code == 1


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("temperature", [-0.1, math.nan, math.inf, "1", None, True]),
        ("top_k", [0, -1, 1.0, math.nan, True]),
        ("min_p", [-0.1, 1.5, math.nan, "0.1", None, True]),
        ("top_p", [0, -0.5, 1.01, math.nan, "0.9", None]),
        ("seed", [-1, 2**64, 1.0, None, True]),
    ],
)
def test_bad_parameters_are_refused(field: str, values: list[object]) -> None:
    for value in values:
        with pytest.raises(DflashError, match=f"^{field}: ") as caught:
            SamplingParams(**{field: value})
        assert caught.value.exit_code == 2


VOCAB = 40
KEPT = 12


@given(
    levels=st.lists(st.integers(0, 6), min_size=VOCAB, max_size=VOCAB),
    top_k=st.integers(1, KEPT - 1),
    top_p=st.sampled_from([0.1, 0.5, 0.9, 1.0]),
    seed=st.integers(0, 50),
)
def test_candidates_choose_what_the_row_chooses_or_nothing(
    levels: list[int], top_k: int, top_p: float, seed: int
) -> None:
    logits = np.array(levels, np.float32) / 4
    sampling = SamplingParams(temperature=0.8, top_k=top_k, top_p=top_p, seed=seed)
    ids = pick_candidates(logits, KEPT, seed)
    chosen = choose_candidate(ids, logits[ids], 7, sampling)
    (expected,) = choose_tokens(logits[None], np.array([7]), sampling)
    ranked = np.sort(logits)[::-1]
    if ranked[top_k - 1] > ranked[KEPT - 1]:
        assert chosen == expected
    else:
        assert chosen is None

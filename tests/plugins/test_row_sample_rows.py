"""The sampling kernel, interpreted, over rows at the ends of what requests make of them.

A grammar's mask and penalties are the host's, which draws such rows itself; what they leave of a
row is nevertheless one that the kernel must draw as `choose_token` does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from dflash_plugins.operation import DType
from dflash_plugins.row_sample.accuracy import compare_draws, sample
from dflash_plugins.testing.interpreter import Interpreter
from dflash_plugins.testing.numeric import Array

from dflash_trt.sampling.choice import choose_token
from dflash_trt.sampling.noise import draw_gumbel
from dflash_trt.sampling.params import SamplingParams, pack_sampling
from dflash_trt.sampling.penalties import Penalties, PenaltyState
from dflash_trt.sampling.rules import Ruled, TokenRules
from tests.covering import exhaustive

pytestmark = pytest.mark.numeric


@dataclass(frozen=True)
class Masked:
    """Which tokens of a row a grammar leaves, what penalties it has, and how it is drawn."""

    allowed: tuple[int, ...]
    params: SamplingParams
    penalties: Penalties = Penalties()


def drawn(*, seed: int = 7, temperature: float = 0.9, **other: float | None) -> SamplingParams:
    return SamplingParams(temperature=temperature, seed=seed, **other)  # type: ignore[arg-type]


STRONG = Penalties(frequency=1.5, presence=0.75, repetition=1.8, bias=((40, 6.0), (513, 9.0)))
MASKED = {
    "one token": Masked((513,), drawn(top_k=5, top_p=0.6)),
    "one, with penalties": Masked((299,), drawn(top_k=40, top_p=0.9), STRONG),
    "fewer than top-k": Masked((2, 255, 256), drawn(top_k=20, top_p=0.7)),
    "none in the first groups": Masked(tuple(range(512, 515)), drawn(top_p=0.8)),
    "each third": Masked(tuple(range(0, 515, 3)), drawn(top_k=17, top_p=0.95)),
    "each third, greedy": Masked(tuple(range(1, 515, 3)), SamplingParams(), STRONG),
    "each third, all of them": Masked(tuple(range(2, 515, 3)), drawn(seed=2**64 - 3), STRONG),
    "all but one": Masked(tuple(range(1, 515)), drawn(top_k=3), STRONG),
    "hot": Masked(tuple(range(0, 515, 2)), drawn(temperature=1e30, top_p=0.5), STRONG),
    "cold": Masked(tuple(range(0, 515, 2)), drawn(temperature=1e-30, top_k=9, top_p=0.9), STRONG),
}
VOCABULARY = 515


@pytest.mark.parametrize(
    "names", [("fewer than top-k", "each third, greedy"), exhaustive(tuple(MASKED))]
)
def test_what_masks_and_penalties_leave_is_drawn_as_the_host_draws_it(
    interpreter: Interpreter, names: tuple[str, ...]
) -> None:
    generator = np.random.default_rng(11)
    left, expected = [], []
    for position, name in enumerate(names):
        one = MASKED[name]
        row = (4 * generator.standard_normal(VOCABULARY)).astype(np.float32)
        row = PenaltyState(one.penalties, [1, 2, 40, 40], [40, 255, 255, 3]).apply(row)
        mask = TokenRules(allowed=one.allowed).mask(VOCABULARY)
        allowed = Ruled(mask, frozenset(), None)
        expected.append(choose_token(row, position, one.params, allowed))
        left.append(mask.apply(row))
        assert expected[-1] in one.allowed
    tokens = draw(interpreter, np.stack(left)[:, None], [MASKED[name].params for name in names])
    assert tokens[:, 0].tolist() == expected


def draw(interpreter: Interpreter, logits: Array, params: Sequence[SamplingParams]) -> Array:
    """Tokens of logits [B,1,V], of which sequence b is at position b."""
    positions = np.arange(len(logits))[:, None]
    inputs = {"logits": logits, "positions": positions, "sampling": pack_sampling(params)}
    return sample(interpreter.run, inputs)


WAYS = (
    SamplingParams(),
    drawn(),
    drawn(top_k=3),
    drawn(top_p=0.4),
    drawn(top_k=4, top_p=0.7, seed=2**63 + 1),
)
"""Every way to choose, among few of the highest."""


def peaks_at(vocabulary: int, *places: int) -> Array:
    """A row that has the same high logit at `places`, of which none ranks before the first."""
    row = np.random.default_rng(vocabulary).standard_normal(vocabulary)
    row[list(places)] = 9.5
    return row


ROWS: dict[str, Callable[[], Array]] = {
    "the highest is the last group's only token": lambda: peaks_at(513, 512),
    "the highest is in a part of a group": lambda: peaks_at(700, 650),
    "ties on both sides of groups": lambda: peaks_at(1000, 255, 256, 511, 512, 999),
    "ties of a group's ends and the last part": lambda: peaks_at(769, 0, 255, 768),
    "all tokens are equal": lambda: np.full(600, -3.0),
    "less than a group": lambda: peaks_at(200, 199),
    "one less than a group": lambda: peaks_at(255, 254, 0),
    "a group": lambda: peaks_at(256, 255),
    "a token more than a tile": lambda: peaks_at(4097, 4096, 4095),
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        exhaustive(name, dtype)
        for name in ROWS
        for dtype in (DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16)
    ],
)
def test_rows_whose_highest_lie_at_the_ends_of_groups(
    interpreter: Interpreter, name: str, dtype: DType
) -> None:
    row = ROWS[name]().astype(dtype.numpy)
    logits = np.broadcast_to(row, (len(WAYS), 1, len(row)))
    assert compare_draws(interpreter.run, logits, WAYS).wrong is None


def test_ties_across_groups_go_to_the_lowest_ids(interpreter: Interpreter) -> None:
    """Argmax; and a top-k of two of them, the third of which would win and the first would not."""
    ties = np.array([256, 511, 768])
    seed = next(one for one in range(99) if (np.diff(draw_gumbel(one, 1, ties)) > 0).all())
    row = peaks_at(769, *ties).astype(DType.BFLOAT16.numpy)
    params = [SamplingParams(), drawn(top_k=2, seed=seed)]
    assert draw(interpreter, np.stack([row, row])[:, None], params).tolist() == [[256], [511]]


@pytest.mark.exhaustive
@pytest.mark.parametrize("temperature", [5e-324, 1e-30, 1e-3, 0.05, 20.0, 1e3, 1e30, 1e308])
def test_temperatures_at_both_ends(interpreter: Interpreter, temperature: float) -> None:
    generator = np.random.default_rng(5)
    # A top_k of all tokens keeps as many as none at all.
    tops = [(None, 1.0), (17, 1.0), (None, 0.9), (300, 0.999), (777, 0.9)]
    params = [
        drawn(temperature=temperature, seed=seed, top_k=top_k, top_p=top_p)
        for seed, (top_k, top_p) in enumerate(tops)
    ]
    logits = 6 * generator.standard_normal((len(params), 1, 777)).astype(np.float32)
    assert compare_draws(interpreter.run, logits, params).wrong is None

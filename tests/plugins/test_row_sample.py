"""The sampling kernel, interpreted, against choose_tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest
from dflash_plugins.operation import DType
from dflash_plugins.row_sample.accuracy import PARAMS, compare_draws, sample
from dflash_plugins.testing.interpreter import Interpreter
from dflash_plugins.testing.numeric import Array

from dflash_trt.sampling.params import SamplingParams, pack_sampling
from tests.covering import exhaustive

pytestmark = pytest.mark.numeric

BFLOAT16 = DType.BFLOAT16.numpy


def draw(
    interpreter: Interpreter, logits: Array, positions: Array, params: Sequence[SamplingParams]
) -> Array:
    inputs = {"logits": logits, "positions": positions, "sampling": pack_sampling(params)}
    return sample(interpreter.run, inputs)


def check(interpreter: Interpreter, logits: Array, params: Sequence[SamplingParams]) -> None:
    assert compare_draws(interpreter.run, logits, params).wrong is None


@pytest.mark.parametrize(
    ("dtype", "vocabulary"),
    [
        (DType.FLOAT32, 1),
        exhaustive(DType.FLOAT32, 4099),
        (DType.FLOAT16, 13),
        exhaustive(DType.BFLOAT16, 4096),
        (DType.BFLOAT16, 5000),
    ],
)
def test_tokens_are_numpys(interpreter: Interpreter, dtype: DType, vocabulary: int) -> None:
    generator = np.random.default_rng(vocabulary)
    logits = 4 * generator.standard_normal((len(PARAMS), 1, vocabulary))
    check(interpreter, logits.astype(dtype.numpy), PARAMS)


@cache
def logits_of_every_kind() -> dict[str, tuple[Array, Sequence[SamplingParams]]]:
    generator = np.random.default_rng(1)
    few = np.array([-np.inf, -7.5, -0.0, 0.0, 0.25], np.float32)
    tied = few[generator.integers(0, 5, (len(PARAMS), 1, 4500))].astype(BFLOAT16)
    nuclei = [
        SamplingParams(temperature=1.0, seed=seed, top_p=p)
        for seed, p in enumerate((0.5, 0.9, 0.97, 0.999))
    ]
    return {
        # Both zeros, and ties across the blocks that a kernel reads: equal logits rank by id.
        "ties": (tied, PARAMS),
        # One noise decides among all tokens of the largest vocabulary.
        "equal": (np.zeros((2, 1, 262_144), np.float32), PARAMS[:2]),
        "many rows": (2 * generator.standard_normal((4, 8, 300)).astype(BFLOAT16), nuclei),
    }


@pytest.mark.parametrize("kind", logits_of_every_kind())
def test_tokens_of_every_kind_of_logits_are_numpys(interpreter: Interpreter, kind: str) -> None:
    check(interpreter, *logits_of_every_kind()[kind])


def test_rows_that_hold_no_numbers(interpreter: Interpreter) -> None:
    """Where choose_tokens raises there is no token."""
    logits = np.zeros((2, 4, 20), np.float32)
    logits[:, 0, 19] = np.nan
    logits[:, 1, 3] = np.inf
    logits[:, 2] = -np.inf
    logits[:, 3, :19] = -np.inf
    tokens = draw(interpreter, logits, np.zeros((2, 4), np.int64), PARAMS[:2])
    assert tokens.tolist() == [[-1, -1, -1, 19]] * 2


def test_a_row_is_drawn_alike_wherever_it_stands(interpreter: Interpreter) -> None:
    generator = np.random.default_rng(3)
    logits = generator.standard_normal((len(PARAMS), 2, 500)).astype(BFLOAT16)
    positions = generator.integers(0, 4000, logits.shape[:2])
    together = draw(interpreter, logits, positions, PARAMS)
    order = generator.permutation(len(PARAMS))[:4]
    moved = draw(interpreter, logits[order], positions[order], [PARAMS[i] for i in order])
    assert (moved == together[order]).all()
    for i in (1, 5):
        alone = draw(interpreter, logits[i : i + 1, 1:], positions[i : i + 1, 1:], [PARAMS[i]])
        assert alone[0, 0] == together[i, 1]

"""The sampling kernel, interpreted, against choose_tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest
from dflash_plugins.accept.checks import expect, make_inputs
from dflash_plugins.operation import DType
from dflash_plugins.row_sample.checks import PARAMS, compare_draws, sample
from dflash_plugins.testing.numeric import Array

from dflash_trt.graph.drawing import accept_function
from dflash_trt.hardware.kernels import MAX_ROWS
from dflash_trt.sampling.noise import draw_gumbel
from dflash_trt.sampling.params import SamplingParams, pack_sampling
from tests.covering import exhaustive
from tests.graph.functions import run_function
from tests.plugins.interpreter import Interpreter, assert_same_bits

BFLOAT16 = DType.BFLOAT16.numpy


def draw(
    interpreter: Interpreter, logits: Array, positions: Array, params: Sequence[SamplingParams]
) -> Array:
    inputs = {"logits": logits, "positions": positions, "sampling": pack_sampling(params)}
    return sample(interpreter.run, inputs)


def check(interpreter: Interpreter, logits: Array, params: Sequence[SamplingParams]) -> None:
    assert compare_draws(interpreter.run, logits, params).mismatch is None


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


def drawn(*, seed: int = 7, temperature: float = 0.9, **other: float | None) -> SamplingParams:
    return SamplingParams(temperature=temperature, seed=seed, **other)  # type: ignore[arg-type]


"""Every way to choose, among few of the highest."""


def peaks_at(vocabulary: int, *places: int) -> Array:
    """A row that has the same high logit at `places`, of which none ranks before the first."""
    row = np.random.default_rng(vocabulary).standard_normal(vocabulary)
    row[list(places)] = 9.5
    return row


def test_ties_across_groups_go_to_the_lowest_ids(interpreter: Interpreter) -> None:
    """Argmax; and a top-k of two of them, the third of which would win and the first would not."""
    ties = np.array([256, 511, 768])
    seed = next(one for one in range(99) if (np.diff(draw_gumbel(one, 1, ties)) > 0).all())
    row = peaks_at(769, *ties).astype(DType.BFLOAT16.numpy)
    params = [SamplingParams(), drawn(top_k=2, seed=seed)]
    positions = np.arange(2)[:, None]
    tokens = draw(interpreter, np.stack([row, row])[:, None], positions, params)
    assert tokens.tolist() == [[256], [511]]


@pytest.mark.parametrize(("batch", "rows"), [(1, 1), (3, 2), (40, 8), (9, 16), (5, MAX_ROWS)])
def test_kernel_body_and_runtime_settle_the_same_tokens(
    interpreter: Interpreter, batch: int, rows: int
) -> None:
    inputs = make_inputs(batch, rows)
    outputs = interpreter.run("accept", inputs)
    for name, expected in expect(inputs).items():
        assert_same_bits(outputs[name], expected)
    bodies = run_function(accept_function(), inputs)
    for actual, expected in zip(outputs.values(), bodies, strict=True):
        assert_same_bits(actual, expected)

"""The sampling kernel, interpreted, against choose_tokens and the function's body."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from dflash_plugins.operation import DType
from dflash_plugins.row_sample.accuracy import PARAMS, compare_draws
from dflash_plugins.testing.interpreter import Interpreter
from dflash_plugins.testing.numeric import Array, assert_same_bits

from dflash_trt.graph.row_sample import row_sample_function
from dflash_trt.sampling.params import SamplingParams, pack_sampling
from tests.covering import exhaustive
from tests.graph.functions import run_function

pytestmark = pytest.mark.numeric

BFLOAT16 = DType.BFLOAT16.numpy


def draw(
    interpreter: Interpreter, logits: Array, positions: Array, params: Sequence[SamplingParams]
) -> Array:
    inputs = {"logits": logits, "positions": positions, "sampling": pack_sampling(params)}
    return interpreter.run("row_sample", inputs)["token_ids"]


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


@pytest.mark.parametrize("dtype", [exhaustive(DType.FLOAT16), DType.BFLOAT16])
def test_kernel_and_body_draw_the_same_tokens(interpreter: Interpreter, dtype: DType) -> None:
    """The node that a graph has and the plugin that stands for it; -1 and large positions too."""
    generator = np.random.default_rng(5)
    logits = (4 * generator.standard_normal((len(PARAMS), 2, 203))).astype(dtype.numpy)
    logits[:, 0, :50] = -np.inf
    logits[::2, 1, 7] = np.nan
    inputs = {
        "logits": logits,
        "positions": generator.integers(2**32 - 1, 2**32 + 2, logits.shape[:2]),
        "sampling": pack_sampling(PARAMS),
    }
    wide = inputs | {"logits": logits.astype(np.float32)}  # NumPy's bfloat16 is not ONNX Runtime's
    (body,) = run_function(row_sample_function(), wide)
    assert_same_bits(interpreter.run("row_sample", inputs)["token_ids"], body)
    assert (body[::2, 1] == -1).all() and (body[1::2] >= 0).all()


def test_equal_logits_rank_by_id(interpreter: Interpreter) -> None:
    """Few distinct logits, both zeros among them, ties across the blocks that a kernel reads."""
    generator = np.random.default_rng(1)
    values = np.array([-np.inf, -7.5, -0.0, 0.0, 0.25], np.float32)
    logits = values[generator.integers(0, 5, (len(PARAMS), 1, 4500))].astype(BFLOAT16)
    check(interpreter, logits, PARAMS)


def test_one_noise_decides_among_all_tokens_of_the_largest_vocabulary(
    interpreter: Interpreter,
) -> None:
    logits = np.zeros((2, 1, 262_144), np.float32)
    check(interpreter, logits, [PARAMS[0], PARAMS[1]])


def test_top_p_over_many_rows(interpreter: Interpreter) -> None:
    generator = np.random.default_rng(7)
    logits = 2 * generator.standard_normal((4, 8, 300)).astype(BFLOAT16)
    params = [
        SamplingParams(temperature=1.0, seed=seed, top_p=p)
        for seed, p in enumerate((0.5, 0.9, 0.97, 0.999))
    ]
    check(interpreter, logits, params)


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

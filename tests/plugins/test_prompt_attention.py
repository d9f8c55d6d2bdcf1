"""The attention kernels over a prompt's chunks, interpreted: more rows than a block has.

Chunks take fewer shares than blocks, and a program's rows see less than the whole chunk does.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from dflash_plugins.block_attention.attention_inputs import attend, make_inputs
from dflash_plugins.block_attention.cases import AttentionShape, make_cases
from dflash_plugins.block_attention.checks import check_case, chunk_cases
from dflash_plugins.block_attention.launch import BLOCK, MOST
from dflash_plugins.operation import Attributes, DType
from dflash_plugins.testing.guarded import Arrays
from dflash_plugins.testing.numeric import assert_same_bits

from dflash_trt.hardware.kernels import (
    MAX_SPLITS,
    ONE_LAUNCH,
    RUN,
    UNIT_ROWS,
    most_splits,
    scratch_bytes,
    share_rows,
    split_count,
    unit_rows,
)
from tests.covering import exhaustive
from tests.plugins.conftest import attention_shape, check_attention
from tests.plugins.interpreter import Interpreter

LONG = 2 * ONE_LAUNCH
"""Positions of a cache with four splits."""

SHAPE = attention_shape(3, 1, 64, LONG, block_size=16, is_causal=True)


@pytest.mark.usefixtures("small_units")
@pytest.mark.parametrize(
    ("rows", "lengths", "shares", "changes"),
    [
        (70, [70, 96], None, {"length": 96, "page_size": 24}),
        exhaustive(17, [17, 600], 2, {}),
        exhaustive(90, [900], 1, {"page_size": 16}),
        (32, [RUN + 1, LONG], 2, {"page_size": 24}),
        (40, [40, 700], 2, {"is_causal": False}),
        (20, [20, 700], None, {"window": 40}),
        (20, [20, 700], None, {"window": 40, "is_causal": False}),
        exhaustive(20, [20, 700], None, {"window": 1}),
        exhaustive(20, [20, 1200], 2, {"window": 1100}),
    ],
)
def test_chunks_of_every_number_of_shares(
    interpreter: Interpreter,
    rows: int,
    lengths: list[int],
    shares: int | None,
    changes: dict[str, Any],
) -> None:
    """Programs of one head's rows, and of one head's end and the next; behind a window is NaN."""
    shape = replace(SHAPE, **changes)
    first = make_cases("", shape, batch=1, rows=rows)[0]
    extras = dict(zip(first.operation.extras, first.launch().extras, strict=True))
    assert extras.get("splits") == shares
    for length in lengths:  # a batch of both would have fewer
        check_attention(interpreter.run, shape, make_inputs(shape, [length], rows, has_sinks=True))


def test_a_row_reads_nothing_of_what_follows_it(interpreter: Interpreter) -> None:
    """Programs of 16 rows of one head: their own reach bounds what they read."""
    shape = replace(SHAPE, query_heads=1, length=512, window=30)
    inputs = make_inputs(shape, [256], 256)
    attended = attend(interpreter.run, shape, inputs)
    for name in ("k_cache", "v_cache"):
        inputs[name][:, :, 128:] = np.nan
    poisoned = attend(interpreter.run, shape, inputs)
    assert make_cases("", shape, batch=1)[0].launch().constants["BLOCK_M"] == 16
    assert_same_bits(poisoned[:, :, :128], attended[:, :, :128])


@pytest.mark.parametrize("window", [exhaustive(0), 40])
def test_a_program_of_more_rows_computes_the_same(interpreter: Interpreter, window: int) -> None:
    shape = replace(SHAPE, query_heads=2, length=ONE_LAUNCH, block_size=2, window=window)
    inputs = make_inputs(shape, [600], rows=70)
    check_attention(partial(interpreter.run, tactic=MOST), shape, inputs)
    launches = [make_cases("", shape, batch=2)[0].launch(tactic) for tactic in (BLOCK, MOST)]
    assert [launch.constants["BLOCK_M"] for launch in launches] == [16, 128]


def test_the_check_on_a_gpu_asks_for_chunks(interpreter: Interpreter) -> None:
    """With products of float16, by the second tactic; and it sees a kernel that is wrong."""
    cases = {case.name: case for case in chunk_cases()}
    assert len(cases) == len(chunk_cases())
    chosen = cases["window, bf16 cache, chunk of 17, tactic 1"]
    shape = replace(chosen.shape, compute=DType.FLOAT16, cache=DType.FLOAT16, query_heads=4)
    chosen = replace(chosen, shape=shape)
    assert check_case(interpreter.run, chosen).mismatch is None

    def wrong(name: str, inputs: Arrays, attributes: Attributes, tactic: int) -> Arrays:
        attributes = {**attributes, "window": 100} if tactic == 1 else attributes
        return interpreter.run(name, inputs, attributes, tactic)

    assert check_case(wrong, chosen).mismatch is not None


def test_a_chunks_scratch_is_that_of_blocks() -> None:
    """gpt-oss-120b's 64 heads over 131,072 positions: what splits leave for their merge."""
    long = AttentionShape(64, 8, 64, 131072, is_causal=True)
    scratch = partial(
        scratch_bytes, capacity=131072, block_size=8, query_heads=64, head_dim=64, batch=1
    )
    block = scratch(window=0, rows=8)
    assert block == (64 * 8 + (MAX_SPLITS - 1) * UNIT_ROWS) * 65 * 4
    for rows in (1, 8, 17, 100, 512, 2048):
        chunk = scratch(window=0, rows=rows)
        assert chunk - block == 64 * (rows - 8) * 65 * 4
        first = make_cases("", long, batch=1, rows=rows)[0]
        outputs = first.outputs.values()
        assert chunk == sum(4 * math.prod(one.shape) for one in outputs)
    assert scratch(window=128, rows=512) == 0


@pytest.mark.parametrize("capacity", [ONE_LAUNCH, 2 * ONE_LAUNCH, 131072])
def test_shares_fit_what_grows_with_rows(capacity: int) -> None:
    """TensorRT allocates for a profile's largest call, which has the fewest shares."""
    most, calls = most_splits(capacity), range(1, 80 * UNIT_ROWS)
    allocated = [share_rows(most, rows) for rows in calls]
    splits = [split_count(most, rows) for rows in calls]
    assert allocated == sorted(allocated)
    needed = [count * rows for count, rows in zip(splits, calls, strict=True)]
    assert all(held >= need for held, need in zip(allocated, needed, strict=True))
    unit = unit_rows(most)
    assert allocated[unit - 1] == needed[unit - 1] == most * unit == MAX_SPLITS * UNIT_ROWS
    assert set(splits[:unit]) == {most}
    assert splits == sorted(splits, reverse=True) and splits[-1] == 1


@pytest.mark.usefixtures("small_units")
@pytest.mark.parametrize("rows", [16, 17, exhaustive(15), exhaustive(32), exhaustive(33)])
def test_shares_of_a_chunk_stay_inside(interpreter: Interpreter, rows: int) -> None:
    """Their guards are whole, and what the last share does not fill stays as it was."""
    inputs = make_inputs(SHAPE, [LONG], rows)
    split = make_cases("", SHAPE, batch=1, rows=rows)[0]
    own = {name: inputs[name] for name in split.operation.inputs}
    outputs = interpreter.run(split.operation.name, own, split.attributes)
    used = split.launch().extras[2] * 3 * rows
    assert outputs["log_sums"].shape == (3 * rows + 3 * unit_rows(4),)
    for values in (outputs["log_sums"], outputs["shares"][:, 0]):
        assert np.isfinite(values[:used]).all()
        assert np.isnan(values[used:]).all()

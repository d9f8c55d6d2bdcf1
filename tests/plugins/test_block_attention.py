"""The attention kernels, interpreted, against a float64 reference.

The interpreter multiplies float32 and float16 right, so those prove the kernel; caches of bfloat16
and FP8 are read with float32 queries. Products of bfloat16 wait for a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
from dflash_plugins.block_attention.attention_inputs import attend, expect, make_inputs
from dflash_plugins.block_attention.cases import AttentionShape, make_cases
from dflash_plugins.block_attention.checks import check_bits, check_case, chunk_cases
from dflash_plugins.block_attention.launch import (
    BLOCK,
    FEW,
    FLOOR,
    LEAST,
    MOST,
)
from dflash_plugins.block_attention.reference import error_bound
from dflash_plugins.operation import Attributes, DType
from dflash_plugins.testing.guarded import Arrays

from dflash_trt.errors import DflashError
from dflash_trt.hardware.kernels import (
    MAX_SPLITS,
    ONE_LAUNCH,
    RUN,
    SPLIT_POSITIONS,
    UNIT_ROWS,
    most_splits,
    scratch_bytes,
    share_rows,
    split_count,
    unit_rows,
)
from tests.covering import exhaustive
from tests.plugins.conftest import attention_shape, check_attention
from tests.plugins.conftest import attention_shape as shaped
from tests.plugins.interpreter import Interpreter, assert_close, assert_same_bits

LONG = 2 * ONE_LAUNCH
"""Positions of a cache with four splits."""

# Query heads, KV heads, head size: the groups of public pairs, one head, groups of no power of 2.
HEADS = [(4, 1, 128), (8, 1, 128), (8, 1, 64), (2, 1, 256), (6, 1, 256), (8, 1, 512)]
HEADS += [(1, 1, 64), (6, 2, 64), (16, 1, 64)]
NARROW = (DType.BFLOAT16, DType.FLOAT8)


def shapes_and_lengths() -> Iterator[tuple[AttentionShape, list[int], dict[str, Any]]]:
    """Attentions, the positions that sequences hold, and what else their inputs are."""
    masks = [{"is_causal": causal, "window": window} for causal in (0, 1) for window in (0, 9)]
    for heads, compute, is_causal in product(HEADS, (DType.FLOAT32, DType.FLOAT16), (False, True)):
        yield shaped(*heads, compute=compute, is_causal=is_causal), [4, 37, 96], {}
    # No context; one key; tiles that end full and with one key.
    for rows, is_causal in product((1, 2, 16), (False, True)):
        shape = shaped(length=130, block_size=16, is_causal=is_causal)
        yield shape, [rows, 64, 65, 128, 130], {"rows": rows}
    # Windows smaller than the block, ending at tiles, longer than the context.
    for window, is_causal in product((1, 3, 4, 50, 64, 200), (False, True)):
        yield shaped(length=200, window=window, is_causal=is_causal), [4, 70, 131, 200], {}
    # Pages smaller and larger than a tile, and of no power of two; lengths at their borders.
    for page_size, window in product((1, 8, 24, 64, 128), (0, 20)):
        shape = shaped(length=150, page_size=page_size, window=window, is_causal=True)
        yield shape, [4, 64, 65, 128, 150], {"has_sinks": True}
    for cache, page_size in product(NARROW, (None, 16)):
        shape = shaped(cache=cache, head_dim=128, page_size=page_size)
        yield shape, [4, 40, 96], {}
        yield replace(shape, length=ONE_LAUNCH), [600], {}
    for mask, page_size in product(masks, (None, 16)):
        shape = shaped(cache=DType.FLOAT8, page_size=page_size, **mask)
        yield shape, [4, 61, 96], {"has_sinks": True}
    # One share, two with a single key in the second, all; a window that leaves shares empty.
    for (window, is_causal), has_sinks in product(((0, 0), (0, 1), (1050, 1)), (False, True)):
        shape = shaped(length=LONG, window=window, is_causal=is_causal)
        yield shape, [4, RUN, RUN + 1, LONG], {"has_sinks": has_sinks}
    # Splits of two runs, and of three.
    turn = MAX_SPLITS * RUN
    past = shaped(2, 1, length=2 * turn + 300, is_causal=True)
    yield past, [2 * turn + 65], {}
    yield replace(past, window=1300), [past.length, turn + 40], {}


@pytest.mark.parametrize(
    ("shape", "lengths", "options"),
    [case if at % 3 == 0 else exhaustive(*case) for at, case in enumerate(shapes_and_lengths())],
)
def test_kernel_is_within_its_bound(
    interpreter: Interpreter, shape: AttentionShape, lengths: list[int], options: dict[str, Any]
) -> None:
    """What no row sees is NaN."""
    check_attention(interpreter.run, shape, make_inputs(shape, lengths, **options))


def test_a_sequence_that_is_not_there_attends_to_nothing(interpreter: Interpreter) -> None:
    shape = shaped(length=130, block_size=16)
    inputs = make_inputs(shape, [16, 64])
    inputs["key_value_lengths"][1] = 0
    attended = attend(interpreter.run, shape, inputs)
    assert attended[0].any() and not attended[1].any()
    assert np.isfinite(attended).all()


def test_a_share_without_positions_is_not_written(interpreter: Interpreter) -> None:
    shape = shaped(2, 1, length=16 * SPLIT_POSITIONS, window=ONE_LAUNCH - 4)
    inputs = make_inputs(shape, [RUN, 16 * RUN])
    split = make_cases("", shape, batch=2)[0]
    outputs = interpreter.run(
        split.operation.name,
        {name: inputs[name] for name in split.operation.inputs},
        split.attributes,
    )
    splits = split.launch().extras[2]
    used = splits * 2 * 2 * 4
    by_split = outputs["shares"][:used].reshape(splits, 2, -1)
    written = np.isfinite(by_split).all(axis=2)
    begin = splits - ONE_LAUNCH // RUN
    assert written[:, 0].tolist() == [True] + (splits - 1) * [False]
    assert written[:, 1].tolist() == begin * [False] + (splits - begin) * [True]
    log_sums = outputs["log_sums"][:used].reshape(splits, 2, -1)
    assert_same_bits(np.isnan(log_sums).all(axis=2), ~written)


@pytest.mark.usefixtures("small_units")
@pytest.mark.parametrize(("batch", "splits"), [(6, 2), (7, 1)])
def test_calls_of_more_rows_have_fewer_splits(
    interpreter: Interpreter, batch: int, splits: int
) -> None:
    """Down to one, when sequences alone fill a GPU."""
    shape = shaped(4, 1, length=ONE_LAUNCH, is_causal=True)
    lengths = [ONE_LAUNCH, 4, 500, *(batch - 3) * [9]]
    assert make_cases("", shape, batch=batch)[0].launch().extras[2] == splits
    check_attention(interpreter.run, shape, make_inputs(shape, lengths, has_sinks=True))


@pytest.mark.parametrize("page_size", [exhaustive(None), 16])
def test_neighbours_and_slots_change_no_bit(
    interpreter: Interpreter, page_size: int | None
) -> None:
    shape = shaped(length=ONE_LAUNCH, page_size=page_size, is_causal=True)
    inputs = make_inputs(shape, [700, 30, 1000])
    together = attend(interpreter.run, shape, inputs)
    for b in range(3):
        alone = dict(inputs)
        one = ["q", "key_value_lengths"]
        one += ["k_cache", "v_cache"] if page_size is None else ["page_table"]
        alone |= {name: inputs[name][b : b + 1] for name in one}
        assert_same_bits(attend(interpreter.run, shape, alone)[0], together[b])


@pytest.mark.parametrize("heads", HEADS)
def test_the_bound_sees_float32_computed_as_less(heads: tuple[int, int, int]) -> None:
    """Products of float16 (TF32 has as many bits of a number) in q k^T, or in the sum of v."""
    shape = shaped(*heads)
    inputs = make_inputs(shape, [96])
    expected = expect(shape, inputs)
    bound = error_bound(shape, inputs, expected)
    for names in (("q", "k_cache"), ("v_cache",)):
        narrow = inputs | {name: inputs[name].astype(np.float16) for name in names}
        with pytest.raises(AssertionError, match="first at"):
            assert_close(expect(shape, narrow), expected, bound)


def test_what_no_kernel_does_is_refused() -> None:
    with pytest.raises(DflashError, match="head size 96, only 64, 128, 256, 512"):
        make_cases("", shaped(head_dim=96), batch=1)[0].launch()
    with pytest.raises(DflashError, match="4 query heads do not divide among 3 KV heads"):
        make_cases("", shaped(kv_heads=3), batch=1)[0].launch()


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


def test_the_check_on_a_gpu_asks_for_chunks(interpreter: Interpreter) -> None:
    """With products of float16, by the second tactic; and it sees a kernel that is wrong."""
    cases = {case.name: case for case in chunk_cases()}
    assert len(cases) == len(chunk_cases())
    chosen = cases["window, bf16 cache, chunk of 17, tactic 1"]
    shape = replace(chosen.shape, compute=DType.FLOAT16, cache=DType.FLOAT16, query_heads=4)
    chosen = replace(chosen, shape=shape)
    assert check_case(chosen, interpreter.run).mismatch is None

    def wrong(name: str, inputs: Arrays, attributes: Attributes, tactic: int) -> Arrays:
        attributes = {**attributes, "window": 100} if tactic == 1 else attributes
        return interpreter.run(name, inputs, attributes, tactic)

    assert check_case(chosen, wrong).mismatch is not None


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


@pytest.mark.parametrize(
    ("tactic", "most", "rows", "changes"),
    [
        (FEW, 32, None, {"query_heads": 4}),
        exhaustive(FEW, 32, None, {"query_heads": 8}),
        (LEAST, 16, None, {"query_heads": 2}),
        (FLOOR, 64, None, {"block_size": 64, "cache": DType.FLOAT8, "page_size": 24}),
        exhaustive(FLOOR, 32, None, {"head_dim": 128, "block_size": 64}),
        (FLOOR, 8, 64, {"head_dim": 512, "block_size": 64, "window": 9, "page_size": 24}),
        (MOST, 128, 70, {"query_heads": 2, "block_size": 2, "window": 40}),
    ],
)
def test_every_tactic_computes_the_same(
    interpreter: Interpreter, tactic: int, most: int, rows: int | None, changes: dict[str, Any]
) -> None:
    """With at most so many rows a program, over several splits."""
    shape = replace(SHAPE, query_heads=2, length=ONE_LAUNCH)
    shape = replace(shape, **changes)
    inputs = make_inputs(shape, [RUN + 40], rows, has_sinks=True)
    check_attention(partial(interpreter.run, tactic=tactic), shape, inputs)
    launches = [make_cases("", shape, batch=1)[0].launch(one) for one in (BLOCK, tactic)]
    block, own = (launch.constants["BLOCK_M"] for launch in launches)
    assert own == most and (own > block) == (tactic == MOST)


def test_a_causal_rows_bits_depend_on_its_own_keys_alone(interpreter: Interpreter) -> None:
    """Whatever the block's length, and what follows: decoding and verification are the same."""
    assert check_bits(interpreter.run, DType.FLOAT32).mismatch is None

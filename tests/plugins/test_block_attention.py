"""The attention kernels, interpreted, against a float64 reference.

The interpreter multiplies float32 and float16 right, so those prove the kernel; caches of bfloat16
and FP8 are read with float32 queries. Products of bfloat16 wait for a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
from dflash_plugins.block_attention.attention_inputs import Inputs, attend, expect, make_inputs
from dflash_plugins.block_attention.cases import AttentionShape, make_cases, wide_shapes
from dflash_plugins.block_attention.checks import accuracy_cases, check_bits, check_case
from dflash_plugins.block_attention.launch import (
    BLOCK,
    FEW,
    FLOOR,
    LEAST,
    attention_operations,
    tile_positions,
)
from dflash_plugins.block_attention.reference import error_bound
from dflash_plugins.operation import Attributes, DType
from dflash_plugins.testing.numeric import Array, assert_same_bits

from dflash_trt.errors import DflashError
from dflash_trt.hardware.kernels import (
    MAX_SPLITS,
    ONE_LAUNCH,
    RUN,
    SPLIT_POSITIONS,
    needs_split,
)
from tests.covering import exhaustive
from tests.plugins.conftest import attention_shape as shaped
from tests.plugins.conftest import check_attention
from tests.plugins.interpreter import Interpreter, assert_close

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


WIDE = wide_shapes(1536)


@pytest.mark.exhaustive
@pytest.mark.parametrize("is_paged", [False, True])
@pytest.mark.parametrize("name", WIDE)
def test_wide_heads_of_public_targets(interpreter: Interpreter, name: str, is_paged: bool) -> None:
    """Three rows, and more positions than a window or a share has. Gemma 4 does not scale q."""
    form = {"compute": DType.FLOAT16, "cache": DType.FLOAT16, "page_size": 24 if is_paged else None}
    shape = replace(WIDE[name], **form)
    lengths = [1100 if shape.window else ONE_LAUNCH + 20]
    sizes = {"score_size": shape.head_dim**0.5} if name.startswith("gemma") else {}
    check_attention(interpreter.run, shape, make_inputs(shape, lengths, 3, **sizes))


@pytest.mark.parametrize(
    ("group", "tactic", "rows"),
    [(1, FEW, 16), (4, FEW, 32), exhaustive(8, FEW, 32), (2, LEAST, 16)],
)
def test_a_program_of_few_rows_computes_the_same(
    interpreter: Interpreter, group: int, tactic: int, rows: int
) -> None:
    """Half of a block's, 16 to 32, or the least, over several splits."""
    shape = shaped(group, 1, length=ONE_LAUNCH, block_size=16, is_causal=True)
    inputs = make_inputs(shape, [RUN + 40])
    check_attention(partial(interpreter.run, tactic=tactic), shape, inputs)
    launches = [make_cases("", shape, batch=1)[0].launch(one) for one in (BLOCK, tactic)]
    block, few = (launch.constants["BLOCK_M"] for launch in launches)
    assert few == rows and few <= block


@pytest.mark.parametrize(
    ("head_dim", "lengths", "changes"),
    [
        (64, [64, 65, 160], {"cache": DType.FLOAT8, "page_size": 24}),
        (128, [RUN + 10], {"length": ONE_LAUNCH}),
        exhaustive(256, [70, 160], {"window": 9}),
        (512, [70, 160], {"window": 9, "page_size": 24}),
    ],
)
def test_the_floor_computes_the_same(
    interpreter: Interpreter, head_dim: int, lengths: list[int], changes: dict[str, Any]
) -> None:
    """A program has the rows of a block of one head, or of a half of one to an eighth."""
    shape = replace(shaped(2, 1, head_dim, 160, block_size=64, is_causal=True), **changes)
    inputs = make_inputs(shape, lengths, has_sinks=True)
    check_attention(partial(interpreter.run, tactic=FLOOR), shape, inputs)
    launches = [make_cases("", shape, batch=1)[0].launch(tactic) for tactic in (BLOCK, FLOOR)]
    most, floor = (launch.constants["BLOCK_M"] * head_dim for launch in launches)
    assert floor == 64 * 64 < most


def test_a_sequence_that_is_not_there_attends_to_nothing(interpreter: Interpreter) -> None:
    shape = shaped(length=130, block_size=16)
    inputs = make_inputs(shape, [16, 64])
    inputs["key_value_lengths"][1] = 0
    attended = attend(interpreter.run, shape, inputs)
    assert attended[0].any() and not attended[1].any()
    assert np.isfinite(attended).all()


@pytest.mark.numeric
@pytest.mark.parametrize("window", [0, 3])
def test_sinks(interpreter: Interpreter, window: int) -> None:
    shape = shaped(window=window)
    inputs = make_inputs(shape, [4, 90], has_sinks=True)
    inputs["sinks"][:2] = [30.0, -30.0]  # takes nearly all, and nothing
    check_attention(interpreter.run, shape, inputs)


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


def test_a_causal_rows_bits_depend_on_its_own_keys_alone(interpreter: Interpreter) -> None:
    """Whatever the block's length, and what follows: decoding and verification are the same."""
    shape = shaped(length=ONE_LAUNCH, query_heads=2, is_causal=True)
    inputs = make_inputs(shape, [600])
    block = attend(interpreter.run, shape, inputs)
    for row in range(4):
        alone = inputs | {"q": np.ascontiguousarray(inputs["q"][:, :, row : row + 1])}
        alone["key_value_lengths"] = np.array([597 + row], np.int32)
        assert_same_bits(attend(interpreter.run, shape, alone)[:, :, 0], block[:, :, row])


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


def test_short_windows_and_caches_take_one_launch() -> None:
    assert not needs_split(ONE_LAUNCH - 1, 16)
    assert needs_split(ONE_LAUNCH, 16)
    assert not needs_split(131072, 16, window=1000)
    assert not needs_split(131072, 16, window=128)
    assert needs_split(131072, 16, window=4096)
    for length in (ONE_LAUNCH, ONE_LAUNCH + 1, 8192, 131072):
        split, merge = make_cases("", shaped(length=length), batch=1)
        splits = split.launch().extras[2]
        assert splits == merge.launch().extras[1] == min(MAX_SPLITS, length // SPLIT_POSITIONS)


@pytest.mark.parametrize("is_quantized", [False, True])
@pytest.mark.parametrize("is_paged", [False, True])
def test_operations_are_found_by_layout_and_type(is_paged: bool, is_quantized: bool) -> None:
    forms = {"is_paged": is_paged, "is_quantized": is_quantized}
    suffix = f"{'_paged' * is_paged}{'_fp8' * is_quantized}"
    (only,) = attention_operations(131072, 16, 128, **forms)
    assert only.name == f"block_attention{suffix}"
    split, merge = attention_operations(131072, 16, 0, **forms)
    assert (split.name, merge.name) == (f"block_attention_split{suffix}", "block_attention_merge")


@pytest.mark.parametrize(
    ("first", "end"),
    [(0, 1), (0, 64), (0, 513), (0, 8192), (0, 2049), (0, 40000), (300, 700), (16000, 33333)],
)
def test_reads_follow_the_positions_held_and_are_shared_evenly(
    interpreter: Interpreter, first: int, end: int
) -> None:
    """Of 131,072 positions that a cache may have: every tile that is seen once, no other."""
    from tests.plugins.interpreted import count_reads

    tile = tile_positions(128, DType.FLOAT16, BLOCK)
    reads = interpreter.call(count_reads, first, end, 131072, MAX_SPLITS, RUN, tile)
    expected = np.zeros(131072 // tile, np.int32)
    expected[first // tile : -(-end // tile)] = 1
    assert_same_bits(reads.sum(axis=0, dtype=np.int32), expected)
    runs = -(-end // RUN) - first // RUN
    assert reads.sum(axis=1).max() <= -(-runs // MAX_SPLITS) * RUN // tile


@pytest.mark.exhaustive
def test_the_check_on_a_gpu_asks_for_what_the_kernels_do(interpreter: Interpreter) -> None:
    """With products of float16; and it sees a kernel that is wrong."""
    cases = {case.name: case for case in accuracy_cases()}
    chosen = [
        cases["heads of 64, long window, fp16, fp16 cache"],
        cases["heads of 128, window paged, fp16, fp8e4nv cache"],
    ]
    chosen = [replace(case, lengths=(RUN + 1, 1500)) for case in chosen]
    assert [check_case(interpreter.run, case).mismatch for case in chosen] == [None, None]
    assert check_bits(interpreter.run).mismatch is None

    def wrong(name: str, inputs: Mapping[str, Array], attributes: Attributes) -> Inputs:
        return interpreter.run(name, inputs, {**attributes, "window": 4})

    found = check_case(wrong, chosen[1]).mismatch
    assert found is not None
    assert found.startswith("first at (0, 0, ")

"""The attention kernels, interpreted, against the function's bodies and a float64 reference.

The interpreter multiplies float32 and float16 right, so those prove the kernel; caches of bfloat16
and FP8 are read with float32 queries. Products of bfloat16 wait for a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from dflash_plugins.block_attention.accuracy import accuracy_cases, check_bits, check_case
from dflash_plugins.block_attention.cases import AttentionShape, make_cases
from dflash_plugins.block_attention.error_bound import BODY, error_bound
from dflash_plugins.block_attention.inputs import Inputs, attend, expect, make_inputs, visible
from dflash_plugins.block_attention.launch import attention_operations, tile_positions
from dflash_plugins.operation import Attributes, DType
from dflash_plugins.testing.interpreter import Interpreter
from dflash_plugins.testing.numeric import Array, assert_close, assert_same_bits

from dflash_trt.errors import DflashError
from dflash_trt.graph.block_attention import block_attention_function
from dflash_trt.graph.form import GraphForm
from dflash_trt.graph.functions import attention_function
from dflash_trt.kernels.attention import MAX_SPLITS, RUN, needs_split
from tests.graph.functions import run_function
from tests.plugins.conftest import KERNEL_FORMS

pytestmark = pytest.mark.numeric

# Query heads, KV heads, head size: the groups of public pairs, one head, groups of no power of 2.
HEADS = [(4, 1, 128), (8, 1, 64), (2, 1, 256), (1, 1, 64), (6, 2, 64), (16, 1, 64)]


def shaped(
    query_heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    length: int = 96,
    compute: DType = DType.FLOAT32,
    **other: Any,
) -> AttentionShape:
    form = {"block_size": 4, "compute": compute, "cache": compute} | other
    return AttentionShape(query_heads, kv_heads, head_dim, length, **form)


def check(interpreter: Interpreter, shape: AttentionShape, inputs: Inputs) -> None:
    attended = attend(interpreter.run, shape, inputs)
    assert attended.dtype == shape.compute.numpy
    expected = expect(shape, inputs)
    assert_close(attended, expected, error_bound(shape, inputs, expected))


def check_body(shape: AttentionShape, inputs: Inputs, lengths: list[int]) -> None:
    """The graph's own function over the same inputs, against the same reference."""
    expected = expect(shape, inputs)
    attended = body(shape, inputs, lengths)
    assert_close(attended, expected, error_bound(shape, inputs, expected, BODY))


def body(shape: AttentionShape, inputs: Inputs, lengths: list[int]) -> Array:
    """attended, by the graph's own function."""
    rows = inputs["q"].shape[2]
    causal_kind = "lower_right" if shape.is_causal and not shape.window else "none"
    function = attention_function("masked" if shape.window else causal_kind)
    tensors = {
        "q": inputs["q"],
        "k": np.nan_to_num(inputs["k_cache"]),
        "v": np.nan_to_num(inputs["v_cache"]),
        "mask": visible(shape, lengths, rows),
        "query_lengths": np.full(len(lengths), rows, np.int32),
        "key_value_lengths": inputs["key_value_lengths"],
    }
    return run_function(function, tensors, causal_kind=causal_kind)[0]


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.FLOAT16])
@pytest.mark.parametrize("heads", HEADS)
def test_kernel_equals_the_functions_bodies(
    interpreter: Interpreter, heads: tuple[int, int, int], dtype: DType
) -> None:
    shape = shaped(*heads, compute=dtype)
    lengths = [4, 37, 96]
    inputs = make_inputs(shape, lengths)
    for is_causal in (False, True):
        masked = replace(shape, is_causal=is_causal)
        check(interpreter, masked, inputs)
        check_body(masked, inputs, lengths)


@pytest.mark.parametrize(("is_causal", "window"), [(True, 0), (False, 0), (True, 9), (False, 9)])
@pytest.mark.parametrize("form", KERNEL_FORMS)
def test_kernel_equals_the_bodies_of_paged_and_fp8_forms(
    interpreter: Interpreter, form: GraphForm, is_causal: bool, window: int
) -> None:
    """float32 queries, which the interpreter multiplies right, over what the form caches."""
    cache = DType.FLOAT8 if form.is_fp8 else DType.FLOAT32
    shape = shaped(cache=cache, page_size=form.page_size, is_causal=is_causal, window=window)
    inputs = make_inputs(shape, [4, 61, 96], has_sinks=True)
    check(interpreter, shape, inputs)
    expected = expect(shape, inputs)
    function = block_attention_function(form)
    for name in ("k_cache", "v_cache"):  # a body reads what only a window has left behind
        held = inputs[name].astype(np.float32)
        inputs[name] = np.nan_to_num(held).astype(inputs[name].dtype)
    (body,) = run_function(function, inputs, is_causal=int(is_causal), window=window)
    assert_close(body, expected, error_bound(shape, inputs, expected, BODY))


@pytest.mark.parametrize("rows", [1, 2, 16])
@pytest.mark.parametrize("is_causal", [False, True])
def test_rows_without_context_and_a_full_cache(
    interpreter: Interpreter, rows: int, is_causal: bool
) -> None:
    """No context; one key; tiles that end full and with one key; a sequence that is not there."""
    shape = shaped(length=130, block_size=16, is_causal=is_causal)
    inputs = make_inputs(shape, [rows, 64, 65, 128, 130], rows)
    check(interpreter, shape, inputs)
    inputs["key_value_lengths"][1] = 0
    attended = attend(interpreter.run, shape, inputs)
    assert not attended[1].any()
    assert np.isfinite(attended).all()


@pytest.mark.parametrize("window", [1, 3, 4, 50, 64, 200])
@pytest.mark.parametrize("is_causal", [False, True])
def test_windows(interpreter: Interpreter, window: int, is_causal: bool) -> None:
    """Smaller than the block, ending at tiles, longer than the context; what is behind is NaN."""
    shape = shaped(length=200, window=window, is_causal=is_causal)
    lengths = [4, 70, 131, 200]
    inputs = make_inputs(shape, lengths)
    check(interpreter, shape, inputs)
    check_body(shape, inputs, lengths)


@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize("page_size", [1, 8, 24, 64, 128])
def test_pages(interpreter: Interpreter, page_size: int, window: int) -> None:
    """Pages smaller and larger than a tile, and of no power of two; lengths at their borders."""
    shape = shaped(length=150, page_size=page_size, window=window, is_causal=True)
    check(interpreter, shape, make_inputs(shape, [4, 64, 65, 128, 150], has_sinks=True))


@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("cache", [DType.BFLOAT16, DType.FLOAT8])
def test_narrow_caches(interpreter: Interpreter, cache: DType, page_size: int | None) -> None:
    shape = shaped(cache=cache, head_dim=128, page_size=page_size)
    check(interpreter, shape, make_inputs(shape, [4, 40, 96]))
    long = replace(shape, length=600)
    check(interpreter, long, make_inputs(long, [600]))


@pytest.mark.parametrize("window", [0, 3])
def test_sinks(interpreter: Interpreter, window: int) -> None:
    shape = shaped(window=window)
    inputs = make_inputs(shape, [4, 90], has_sinks=True)
    inputs["sinks"][:2] = [30.0, -30.0]  # takes nearly all, and nothing
    check(interpreter, shape, inputs)


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize(("window", "is_causal"), [(0, False), (0, True), (600, True)])
def test_splits_join(
    interpreter: Interpreter, window: int, is_causal: bool, has_sinks: bool
) -> None:
    """One share, two with a single key in the second, all; a window that leaves shares empty."""
    shape = shaped(length=3 * RUN, window=window, is_causal=is_causal)
    assert shape.is_split
    inputs = make_inputs(shape, [4, RUN, RUN + 1, 3 * RUN], has_sinks=has_sinks)
    check(interpreter, shape, inputs)


def test_positions_past_the_runs_are_dealt_in_tiles(interpreter: Interpreter) -> None:
    shape = shaped(2, 1, length=32 * RUN + 300, is_causal=True)
    check(interpreter, shape, make_inputs(shape, [32 * RUN + 65]))
    windowed = replace(shape, window=700)
    check(interpreter, windowed, make_inputs(windowed, [shape.length, 32 * RUN + 40]))


def test_a_share_without_positions_is_not_written(interpreter: Interpreter) -> None:
    shape = shaped(2, 1, length=3 * RUN, window=RUN + 60)
    inputs = make_inputs(shape, [RUN, 2 * RUN + 70])
    split = make_cases("", shape, batch=2)[0]
    outputs = interpreter.run(
        split.operation.name,
        {name: inputs[name] for name in split.operation.inputs},
        split.attributes,
    )
    by_split = outputs["shares"].reshape(2, 2, 3, 4, 64)
    written = np.isfinite(by_split).all(axis=(1, 3, 4))
    assert written.tolist() == [[True, False, False], [False, True, True]]
    log_sums = outputs["log_sums"].reshape(2, 2, 3, 4)
    assert_same_bits(np.isnan(log_sums).all(axis=(1, 3)), ~written)


@pytest.mark.parametrize("page_size", [None, 16])
def test_neighbours_and_slots_change_no_bit(
    interpreter: Interpreter, page_size: int | None
) -> None:
    shape = shaped(length=2 * RUN, page_size=page_size, is_causal=True)
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
    shape = shaped(length=2 * RUN, query_heads=2, is_causal=True)
    inputs = make_inputs(shape, [600])
    block = attend(interpreter.run, shape, inputs)
    for row in range(4):
        alone = inputs | {"q": np.ascontiguousarray(inputs["q"][:, :, row : row + 1])}
        alone["key_value_lengths"] = np.array([597 + row], np.int32)
        assert_same_bits(attend(interpreter.run, shape, alone)[:, :, 0], block[:, :, row])


def test_a_wrong_kernel_is_noticed(interpreter: Interpreter) -> None:
    shape = shaped(is_causal=True)
    inputs = make_inputs(shape, [50])
    attended = attend(interpreter.run, replace(shape, is_causal=False), inputs)
    expected = expect(shape, inputs)
    with pytest.raises(AssertionError, match=r"first at \(0, 0, 0, 0\)"):
        assert_close(attended, expected, error_bound(shape, inputs, expected))


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
    with pytest.raises(DflashError, match="head size 96, only 64, 128, 256"):
        make_cases("", shaped(head_dim=96), batch=1)[0].launch()
    with pytest.raises(DflashError, match="4 query heads do not divide among 3 KV heads"):
        make_cases("", shaped(kv_heads=3), batch=1)[0].launch()


def test_short_windows_and_caches_take_one_launch() -> None:
    assert not needs_split(RUN, 16)
    assert needs_split(RUN + 1, 16)
    assert not needs_split(131072, 16, window=128)
    assert needs_split(131072, 16, window=4096)
    for length in (RUN + 1, 8192, 131072):
        split = make_cases("", shaped(length=length), batch=1)[0]
        splits = split.launch().extras[2]
        assert splits == min(MAX_SPLITS, -(-length // RUN))
    merge = make_cases("", shaped(length=RUN + 1), batch=1)[1]
    assert merge.launch().extras[1] == 2


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
    [(0, 1), (0, 64), (0, 513), (0, 8192), (0, 16385), (0, 40000), (300, 700), (16000, 33333)],
)
def test_reads_follow_the_positions_held_and_are_shared_evenly(
    interpreter: Interpreter, first: int, end: int
) -> None:
    """Of 131,072 positions that a cache may have: every tile that is seen once, no other."""
    from tests.plugins.interpreted import count_reads

    tile = tile_positions(128)
    reads = interpreter.call(count_reads, first, end, 131072, 32, RUN, tile)
    expected = np.zeros(131072 // tile, np.int32)
    expected[first // tile : -(-end // tile)] = 1
    assert_same_bits(reads.sum(axis=0, dtype=np.int32), expected)
    dealt = int(expected[32 * RUN // tile :].sum())
    assert reads.sum(axis=1).max() <= RUN // tile + -(-dealt // 32)


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

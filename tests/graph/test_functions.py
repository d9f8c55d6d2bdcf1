"""Function bodies and the window mask against explicit loops, each in a graph of its own."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
from dflash_plugins.block_attention.reference import masked_error_bound
from dflash_plugins.testing.numeric import assert_close, epsilon, sum_error
from onnx import TensorProto

from dflash_trt.graph.call_rows import Rows
from dflash_trt.graph.functions import AttentionOverload, attention_function, swiglu_function
from dflash_trt.graph.kv_cache_update import kv_feature_injection_function
from tests.graph.functions import Array, attend, builder, open_model, random, run_function
from tests.reference.compare import max_relative_error

HEADS, KV_HEADS, HEAD_DIM, LENGTH = 4, 2, 16, 48
UNIT = epsilon(np.float32)
OVERLOADS: list[AttentionOverload] = ["lower_right", "none", "masked"]


@pytest.mark.numeric
@pytest.mark.parametrize("rows", [1, 2, 5, 16])
@pytest.mark.parametrize("overload", OVERLOADS)
def test_attention_equals_softmax_over_the_keys_that_each_row_may_see(
    overload: AttentionOverload, rows: int
) -> None:
    starts = np.array([0, 7, LENGTH - rows])
    batch = len(starts)
    queries = random(0, batch, HEADS, rows, HEAD_DIM) / np.float32(math.sqrt(HEAD_DIM))
    keys, values = (random(i, batch, KV_HEADS, LENGTH, HEAD_DIM) for i in (1, 2))
    row, key = np.arange(rows)[:, None], np.arange(LENGTH)[None, :]
    seen = np.stack([np.broadcast_to(key < s + rows, (rows, LENGTH)) for s in starts])
    lengths = (starts + rows).astype(np.int32)
    feeds: dict[str, Array] = {"q": queries, "k": keys, "v": values, "key_value_lengths": lengths}
    if overload == "lower_right":
        seen &= np.stack([key <= row + s for s in starts])
    if overload == "masked":
        near = np.stack([np.abs(row + s - key) < 6 for s in starts])
        feeds["mask"] = near[:, None]
        seen &= near
    kind = "none" if overload == "masked" else overload
    (actual,) = run_function(attention_function(overload), feeds, causal_kind=kind)
    expected = attend(queries, keys, values, seen)
    assert_close(actual, expected, masked_error_bound(queries, keys, values, seen, expected))


@pytest.mark.parametrize("overload", OVERLOADS)
def test_what_lies_past_the_length_or_behind_the_mask_weighs_nothing(
    overload: AttentionOverload,
) -> None:
    """A finite key or value out of sight changes no bit, however large."""
    outputs = []
    for garbage in (0.0, 1e4, -1e30):
        feeds: dict[str, Array] = {
            "q": random(0, 1, HEADS, 3, HEAD_DIM),
            "k": random(1, 1, KV_HEADS, 64, HEAD_DIM),
            "v": random(2, 1, KV_HEADS, 64, HEAD_DIM),
            "key_value_lengths": np.array([9], np.int32),
        }
        feeds["k"][:, :, 9:] = feeds["v"][:, :, 9:] = garbage
        if overload == "masked":
            feeds["mask"] = np.zeros((1, 1, 3, 64), bool)
            feeds["mask"][..., 4:] = True
            feeds["k"][:, :, :4] = feeds["v"][:, :, :4] = garbage
        outputs += run_function(attention_function(overload), feeds, causal_kind="none")
    np.testing.assert_array_equal(outputs[0], outputs[1])
    np.testing.assert_array_equal(outputs[0], outputs[2])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [1, 2, 7, 500])
def test_the_window_mask_equals_an_explicit_one(window: int, causal: bool) -> None:
    starts, rows, length = np.array([0, 3, 20]), 4, 29
    b = builder()
    ids = b.input("ids", TensorProto.INT64, ["B", "S"])
    mask = Rows(b, ids, b.input("start", TensorProto.INT64, ["B"])).window_mask(
        window, causal, lambda: b.integers(length)
    )
    feeds = {"ids": np.zeros((3, rows), np.int64), "start": starts}
    (actual,) = open_model(b, [mask]).run(None, feeds)
    for s, row, key in np.ndindex(3, rows, length):
        distance = starts[s] + row - key
        expected = abs(distance) < window and not (causal and distance < 0)
        assert actual[s, 0, row, key] == expected, (starts[s], row, key)


def test_one_window_mask_serves_every_layer_that_shares_it() -> None:
    b = builder()
    rows = Rows(b, "ids", "start")
    kinds = [(4, True), (4, False), (4, True)]
    masks = [rows.window_mask(window, causal, lambda: "length") for window, causal in kinds]
    assert masks[0] == masks[2] != masks[1]


@pytest.mark.numeric
def test_swiglu_is_silu_of_the_gate_times_up() -> None:
    x, y = 30 * random(0, 5, 7), random(1, 5, 7)
    (actual,) = run_function(swiglu_function(), {"gate": x, "up": y})
    wide = x.astype(float)
    # An exponential that is right to two units in the last place, a sum, a quotient, two products.
    roundings = 8 * UNIT
    assert max_relative_error(actual, wide / (1 + np.exp(-wide)) * y) < roundings


def rotated(x: npt.NDArray[np.float64], position: int, theta: float) -> npt.NDArray[np.float64]:
    """RoPE of one head, pair by pair; halves convention."""
    half = len(x) // 2
    result = np.empty_like(x)
    for i in range(half):
        angle = position * theta ** (-i / half)
        cos, sin = math.cos(angle), math.sin(angle)
        result[i] = x[i] * cos - x[i + half] * sin
        result[i + half] = x[i + half] * cos + x[i] * sin
    return result


def test_injection_norms_rotates_and_writes_k_and_writes_v_as_it_is() -> None:
    starts, rows, theta, epsilon = [0, 9, 5], 3, 100.0, 1e-3
    batch = len(starts)
    angles = np.outer(np.arange(16), theta ** (-np.arange(HEAD_DIM // 2) / (HEAD_DIM // 2)))
    feeds: dict[str, Array] = {
        "k": random(0, batch, rows, KV_HEADS, HEAD_DIM),
        "v": random(1, batch, rows, KV_HEADS, HEAD_DIM),
        "k_norm": random(2, HEAD_DIM),
        "cos": np.cos(angles).astype(np.float32),
        "sin": np.sin(angles).astype(np.float32),
        "positions": np.array(starts)[:, None] + np.arange(rows),
        "k_cache": random(3, batch, KV_HEADS, 12, HEAD_DIM),
        "v_cache": random(4, batch, KV_HEADS, 12, HEAD_DIM),
    }
    keys, values = run_function(kv_feature_injection_function(), feeds, epsilon=epsilon)
    expected_k, expected_v = feeds["k_cache"].astype(float), feeds["v_cache"].copy()
    for s, row, head in np.ndindex(batch, rows, KV_HEADS):
        position = starts[s] + row
        x = feeds["k"][s, row, head].astype(float)
        normed = x / math.sqrt((x**2).mean() + epsilon) * feeds["k_norm"]
        expected_k[s, head, position] = rotated(normed, position, theta)
        expected_v[s, head, position] = feeds["v"][s, row, head]
    # The mean of squares, its root's reciprocal, the tables' own rounding, products and a sum.
    bound = sum_error(HEAD_DIM, 1.0, UNIT) / 2 + 8 * UNIT
    assert max_relative_error(keys, expected_k) < 2 * bound  # of two terms
    np.testing.assert_array_equal(values, expected_v)

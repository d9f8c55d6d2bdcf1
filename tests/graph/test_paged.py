"""The paged functions against plain loops and against the linear functions, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from dflash_trt.graph.caches.cpu import paged_attention_function
from dflash_trt.graph.form import GraphForm
from dflash_trt.graph.functions import AttentionOverload, attention_function
from dflash_trt.graph.kv_cache_update import kv_feature_injection_function
from tests.graph.functions import Array, random, run_function
from tests.reference.compare import assert_bitwise_equal

SIZE, PAGES, KV_HEADS, HEADS, HEAD_DIM = 8, 40, 2, 4, 16
LENGTHS = (128, 5, 71)  # of three sequences, behind whose ends the table names any page
COLUMNS = 16
BATCH = len(LENGTHS)


def page_table() -> npt.NDArray[np.int32]:
    """No two sequences share a page that either holds."""
    pages = np.random.default_rng(0).permutation(PAGES).astype(np.int32)
    table = np.full((BATCH, COLUMNS), pages[-1], np.int32)
    taken = 0
    for b, length in enumerate(LENGTHS):
        used = -(-length // SIZE)
        table[b, :used] = pages[taken : taken + used]
        taken += used
    assert taken < PAGES
    return table


def gather(pool: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The linear cache [B,H_kv,C·SIZE,D] that a pool stands for, position by position."""
    linear = np.empty((BATCH, KV_HEADS, COLUMNS * SIZE, HEAD_DIM), np.float32)
    for b, position in np.ndindex(BATCH, COLUMNS * SIZE):
        linear[b, :, position] = pool[page_table()[b, position // SIZE], position % SIZE]
    return linear


@pytest.mark.parametrize("rows", [1, 3, 5])
@pytest.mark.parametrize("overload", ["lower_right", "none", "masked"])
def test_attention_over_pages_is_attention_over_what_they_hold(
    overload: AttentionOverload, rows: int
) -> None:
    linear = attention_function(overload)
    paged = paged_attention_function(linear)
    assert (paged.domain, paged.name) == ("dflash", "block_attention_paged")
    assert paged.overload == overload
    k, v = (random(seed, PAGES, SIZE, KV_HEADS, HEAD_DIM) for seed in (1, 2))
    q = random(3, BATCH, HEADS, rows, HEAD_DIM)
    feeds: dict[str, Array] = {"q": q, "key_value_lengths": np.array(LENGTHS, np.int32)}
    if overload == "masked":
        feeds["mask"] = np.random.default_rng(4).random((BATCH, 1, rows, COLUMNS * SIZE)) < 0.5
        feeds["mask"][..., 0] = True
    kind = "none" if overload == "masked" else overload
    pools = {"k_cache": k, "v_cache": v, "page_table": page_table()}
    caches = {"k": gather(k), "v": gather(v)}
    (want,) = run_function(linear, feeds | caches, causal_kind=kind)
    attributes = {"causal_kind": kind, "page_size": SIZE, "kv_heads": KV_HEADS}
    (got,) = run_function(paged, feeds | pools, **attributes)
    assert_bitwise_equal(got, want, overload)


def test_injection_into_pages_is_injection_into_linear_caches() -> None:
    rows = 4
    feeds: dict[str, Array] = {
        name: random(seed, BATCH, rows, KV_HEADS, HEAD_DIM) for seed, name in enumerate("kv", 5)
    }
    feeds["k_norm"] = random(7, HEAD_DIM)
    feeds |= {name: random(seed, 200, HEAD_DIM // 2) for seed, name in enumerate(("cos", "sin"), 8)}
    feeds["positions"] = np.array([np.arange(length - rows, length) for length in LENGTHS])
    pools = {
        f"{name}_cache": random(seed, PAGES, SIZE, KV_HEADS, HEAD_DIM)
        for seed, name in enumerate("kv", 10)
    }
    caches = {name: gather(pool) for name, pool in pools.items()}
    pools["page_table"] = page_table()
    want = run_function(kv_feature_injection_function(), feeds | caches, epsilon=1e-6)
    function = kv_feature_injection_function(GraphForm(page_size=SIZE))
    got = run_function(function, feeds | pools, epsilon=1e-6, page_size=SIZE)
    for linear, pool in zip(want, map(gather, got), strict=True):
        for index, length in enumerate(LENGTHS):
            assert_bitwise_equal(pool[index, :, :length], linear[index, :, :length], f"{index}")

"""The paged functions against plain loops and against the linear functions, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from onnx import TensorProto

from dflash_trt.graph.caches.paged import paged_attention_function
from dflash_trt.graph.form import GraphForm, Precision
from dflash_trt.graph.functions import AttentionOverload, attention_function
from dflash_trt.graph.kv_cache_update import kv_cache_update_function
from dflash_trt.graph.kv_feature_injection import kv_feature_injection_function
from tests.graph.builds import PAIRS, build
from tests.graph.functions import builder, random, run
from tests.pairs import PairFactory
from tests.reference.compare import assert_bitwise_equal

SIZE, PAGES, KV_HEADS, HEADS, HEAD_DIM = 8, 40, 2, 4, 16
LENGTHS = (128, 5, 71)  # of three sequences, behind whose ends the table names any page
COLUMNS = 16
BATCH = len(LENGTHS)
PAGED = GraphForm(page_size=SIZE)


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


def positions(rows: int) -> npt.NDArray[np.int64]:
    return np.array([np.arange(length - rows, length) for length in LENGTHS])


def test_an_update_writes_its_rows_and_nothing_else() -> None:
    rows = 5
    b = builder()
    shape = ["pages", SIZE, KV_HEADS, HEAD_DIM]
    values = [b.input(n, TensorProto.FLOAT, ["B", KV_HEADS, "S", HEAD_DIM]) for n in "kv"]
    at = b.input("positions", TensorProto.INT64, ["B", "S"])
    table = b.input("page_table", TensorProto.INT32, ["B", "C"])
    pools = [b.input(f"{n}_cache", TensorProto.FLOAT, shape) for n in "kv"]
    for name in "kv":
        b.output(f"{name}_out", TensorProto.FLOAT, shape)
    b.call(
        kv_cache_update_function(PAGED),
        [*values, at, table, *pools],
        "update",
        outputs=["k_out", "v_out"],
        page_size=SIZE,
    )
    before = [random(seed, PAGES, SIZE, KV_HEADS, HEAD_DIM) for seed in (1, 2)]
    new = [random(seed, BATCH, KV_HEADS, rows, HEAD_DIM) for seed in (3, 4)]
    feeds = {"k": new[0], "v": new[1], "positions": positions(rows), "page_table": page_table()}
    after = run(b.finish(), feeds | {"k_cache": before[0], "v_cache": before[1]})
    for pool, written, result in zip(before, new, after, strict=True):
        expected = pool.copy()
        for index, row in np.ndindex(BATCH, rows):
            position = positions(rows)[index, row]
            page = page_table()[index, position // SIZE]
            expected[page, position % SIZE] = written[index, :, row]
        assert_bitwise_equal(result, expected, "pool")


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
    k, v = (random(seed, PAGES, SIZE, KV_HEADS, HEAD_DIM) for seed in (1, 2))
    q = random(3, BATCH, HEADS, rows, HEAD_DIM)
    feeds = {"q": q, "kv_lengths": np.array(LENGTHS, np.int32)}
    if overload == "masked":
        seen = np.random.default_rng(4).random((BATCH, 1, rows, COLUMNS * SIZE)) < 0.5
        seen[..., 0] = True
        feeds["mask"] = seen
    results = []
    for paged in (False, True):
        b = builder()
        operands = [b.input("q", TensorProto.FLOAT, ["B", HEADS, "S", HEAD_DIM])]
        shape = ["p", SIZE, KV_HEADS, HEAD_DIM] if paged else ["B", KV_HEADS, "M", HEAD_DIM]
        operands += [b.input(name, TensorProto.FLOAT, shape) for name in ("k", "v")]
        masked = overload == "masked"
        operands.append(b.input("mask", TensorProto.BOOL, ["B", 1, "S", "M"]) if masked else "")
        operands += ["", b.input("kv_lengths", TensorProto.INT32, ["B"])]
        b.output("out", TensorProto.FLOAT, ["B", HEADS, "S", HEAD_DIM])
        attributes: dict[str, Any] = {"causal_kind": "none" if masked else overload}
        function = linear
        caches: dict[str, Any] = {"k": gather(k), "v": gather(v)}
        if paged:
            function = paged_attention_function(linear)
            assert (function.domain, function.name) == ("dflash", "block_attention_paged")
            assert function.overload == overload
            operands.append(b.input("page_table", TensorProto.INT32, ["B", "C"]))
            attributes |= {"page_size": SIZE, "kv_heads": KV_HEADS}
            caches = {"k": k, "v": v, "page_table": page_table()}
        b.call(function, operands, "attend", outputs=["out"], **attributes)
        results += run(b.finish(), feeds | caches)
    assert_bitwise_equal(results[1], results[0], overload)


def test_injection_into_pages_is_injection_into_linear_caches() -> None:
    rows = 4
    table, at = page_table(), positions(rows)
    kv = {name: random(seed, BATCH, rows, KV_HEADS, HEAD_DIM) for seed, name in enumerate("kv", 5)}
    tables = {name: random(seed, 200, HEAD_DIM // 2) for seed, name in enumerate(("cos", "sin"), 8)}
    feeds = {**kv, "k_norm": random(7, HEAD_DIM), **tables, "positions": at}
    pools = {
        f"{name}_pool": random(seed, PAGES, SIZE, 2, HEAD_DIM) for seed, name in enumerate("kv", 10)
    }
    caches = {f"{name}_cache": gather(pools[f"{name}_pool"]) for name in "kv"}
    results = []
    for paged in (False, True):
        b = builder()
        shape = ["p", SIZE, KV_HEADS, HEAD_DIM] if paged else ["B", KV_HEADS, "M", HEAD_DIM]
        operands = [b.input(one, TensorProto.FLOAT, ["B", "S", KV_HEADS, HEAD_DIM]) for one in "kv"]
        operands.append(b.input("k_norm", TensorProto.FLOAT, [HEAD_DIM]))
        operands += [b.input(one, TensorProto.FLOAT, ["P", HEAD_DIM // 2]) for one in tables]
        operands.append(b.input("positions", TensorProto.INT64, ["B", "S"]))
        attributes: dict[str, Any] = {"epsilon": 1e-6}
        function, given = kv_feature_injection_function(), dict(caches)
        if paged:
            function, given = kv_feature_injection_function(PAGED), {**pools}
            operands.append(b.input("page_table", TensorProto.INT32, ["B", "C"]))
            attributes["page_size"] = SIZE
        operands += [b.input(one, TensorProto.FLOAT, shape) for one in given]
        for name in ("k_out", "v_out"):
            b.output(name, TensorProto.FLOAT, shape)
        b.call(function, operands, "inject", outputs=["k_out", "v_out"], **attributes)
        extra = {"page_table": table} if paged else {}
        results.append(run(b.finish(), feeds | given | extra))
    for linear, pool in zip(*results, strict=True):
        got = gather(pool)
        for index, length in enumerate(LENGTHS):
            assert_bitwise_equal(got[index, :, :length], linear[index, :, :length], f"{index}")


@pytest.mark.parametrize("precision", Precision)
@pytest.mark.parametrize("pair", list(PAIRS))
def test_paged_graphs_differ_in_their_caches_only(
    make_pair: PairFactory, pair: str, precision: Precision
) -> None:
    """The same other inputs, outputs and linears, in every compute type that a graph can have."""
    built = PAIRS[pair](make_pair)
    for graph in ("target", "draft", "target_only"):
        plain = build(built, graph, GraphForm(precision))
        paged = build(built, graph, GraphForm(precision, page_size=16))
        shapes = [
            {
                value.name: value.type.tensor_type
                for value in [*model.graph.input, *model.graph.output]
            }
            for model in (plain, paged)
        ]
        assert set(shapes[1]) == {*shapes[0], "page_table"}
        for name, kind in shapes[0].items():
            assert shapes[1][name].elem_type == kind.elem_type
            if "_k_" in name or "_v_" in name:
                dims = [dim.dim_param or dim.dim_value for dim in shapes[1][name].shape.dim]
                heads, size = kind.shape.dim[1].dim_value, kind.shape.dim[3].dim_value
                assert dims == ["pages", 16, heads, size]
            else:
                assert shapes[1][name] == kind
        assert not {"TensorScatter", "TRT_Attention"} & {node.op_type for node in paged.graph.node}
        products = [[n.name for n in m.graph.node if n.op_type == "Gemm"] for m in (plain, paged)]
        assert products[0] == products[1]

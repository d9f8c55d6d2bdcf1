"""Graphs whose caches only kernels read: what they say is what the plain graphs say.

float16 where they run, since ONNX Runtime has no bfloat16 on the CPU. The bodies are the definition
that the kernels are held to; FP8 caches are codes here, and float32 numbers in the CPU's graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from onnx import TensorProto

from dflash_trt.graph.bindings import GRAPH_NAMES, GraphName
from dflash_trt.graph.check import check_graph
from dflash_trt.graph.form import CacheDtype, GraphForm, Precision
from tests.graph.builds import build, open_model
from tests.pairs import PairFactory, TinyPair

Array = npt.NDArray[Any]

LENGTH, SIZE, PAGES, BATCH = 128, 16, 24, 3
LAYERS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 20}
PAIRS: dict[str, Callable[[PairFactory], TinyPair]] = {
    "qwen3": lambda make_pair: make_pair(
        "qwen3",
        {"head_dim": 64, "num_layers": 3, "vocab": 97},
        {"head_dim": 64, "num_layers": 2, "target_layer_ids": [0, 2], **LAYERS},
    ),
    # All experts of every row: a router near a tie would choose others for float16's roundings.
    "gpt_oss": lambda make_pair: make_pair(
        "gpt_oss",
        {"head_dim": 64, "num_layers": 2, "vocab": 97, "experts": 4, "chosen": 4},
        {"head_dim": 64, "num_layers": 1, "target_layer_ids": [0, 1]},
    ),
}
FORMS = {
    "paged": {"page_size": SIZE, "pages": PAGES},
    "fp8": {"cache_dtype": CacheDtype.FP8},
    "paged_fp8": {"page_size": SIZE, "pages": PAGES, "cache_dtype": CacheDtype.FP8},
}


def form(name: str, precision: Precision = Precision.FLOAT16) -> GraphForm:
    return GraphForm(precision, LENGTH, **FORMS.get(name, {}))  # type: ignore[arg-type]


@pytest.fixture(params=list(PAIRS))
def built(request: pytest.FixtureRequest, make_pair: PairFactory) -> TinyPair:
    return PAIRS[request.param](make_pair)


@pytest.mark.parametrize("precision", [Precision.FLOAT16, Precision.BFLOAT16])
@pytest.mark.parametrize("graph", GRAPH_NAMES)
@pytest.mark.parametrize("name", FORMS)
def test_every_cache_is_written_and_read_by_one_operation_each(
    built: TinyPair, graph: GraphName, name: str, precision: Precision
) -> None:
    made = form(name, precision)
    model = build(built, graph, made)
    check_graph(model)
    values = {one.name: one.type.tensor_type for one in (*model.graph.input, *model.graph.output)}
    caches = {key: one for key, one in values.items() if "_k_" in key or "_v_" in key}
    kind = TensorProto.FLOAT8E4M3FN if made.is_fp8 else precision.onnx_type
    assert {one.elem_type for one in caches.values()} == {kind}
    for one in caches.values():
        shape = [dim.dim_value for dim in one.shape.dim]
        assert shape[-1] == 64  # no room for sinks
        assert shape[:2] == [PAGES + 1, SIZE] if made.is_paged else shape[2] == LENGTH
    if made.is_paged:
        table = values["page_table"]
        assert table.elem_type == TensorProto.INT32
        assert [dim.dim_param or dim.dim_value for dim in table.shape.dim] == ["B", LENGTH // SIZE]
    called = {node.op_type for node in model.graph.node if node.domain == "dflash"}
    operations = {f"kv_cache_update_{name}", f"block_attention_{name}"}
    operations |= {f"kv_feature_injection_{name}"} if graph == "target" else set()
    assert called - {"swiglu", "moe"} == operations
    plain = {node.op_type for node in model.graph.node if node.domain == ""}
    assert not plain & {"TensorScatter", "Attention", "ScatterND"}
    written = [out for n in model.graph.node for out in n.output if n.op_type.startswith("kv_")]
    assert sorted(written) == sorted(key for key in caches if key.endswith("_out"))


class Run:
    """A graph over caches of its own, called like an engine: in place, pages as a table says."""

    def __init__(self, built: TinyPair, graph: GraphName, made: GraphForm, table: Array) -> None:
        self.session = open_model(built, build(built, graph, made))
        self.form, self.table = made, table
        kinds = {"tensor(float8e4m3fn)": ml_dtypes.float8_e4m3fn, "tensor(float16)": np.float16}
        kinds["tensor(float)"] = np.float32
        self.caches: dict[str, Array] = {}
        for value in self.session.get_inputs():
            if "_k_" in value.name or "_v_" in value.name:
                shape = value.shape if made.is_paged else [BATCH, *value.shape[1:]]
                # Rows that nobody wrote are NaN where kernels read: they must not matter.
                fill = np.nan if made.has_kernel_caches else 0
                self.caches[value.name] = np.full(shape, fill, np.float32).astype(kinds[value.type])

    def __call__(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        given = dict(feeds)
        if self.form.is_paged:
            given["page_table"] = self.table
        io = self.session.io_binding()
        for name, array in given.items():
            io.bind_cpu_input(name, array)
        for name, cache in self.caches.items():
            kind = cache.dtype.type
            element = TensorProto.FLOAT8E4M3FN if kind is ml_dtypes.float8_e4m3fn else kind
            io.bind_input(name, "cpu", 0, element, cache.shape, cache.ctypes.data)
        results = [one.name for one in self.session.get_outputs()]
        for name in results:
            io.bind_output(name)
        self.session.run_with_iobinding(io)
        values = dict(zip(results, io.get_outputs(), strict=True))
        for name, cache in self.caches.items():
            after = values.pop(f"{name}_out").numpy()
            cache[...] = after.view(cache.dtype) if after.dtype == np.uint8 else after
        return {name: value.numpy() for name, value in values.items()}

    def held(self, name: str, b: int, length: int) -> Array:
        """The first rows of a sequence in a cache, [length, H_kv, D] float64."""
        cache = self.caches[name]
        if not self.form.is_paged:
            return cache[b, :, :length].swapaxes(0, 1).astype(np.float64)[..., :64]
        at = np.arange(length)
        return cache[self.table[b, at // SIZE], at % SIZE].astype(np.float64)


def page_table() -> Array:
    """Pages in no order; the last page, nobody's, behind them."""
    pages = np.random.default_rng(0).permutation(PAGES).astype(np.int32)
    table = np.full((BATCH, LENGTH // SIZE), PAGES, np.int32)
    for b, count in enumerate((8, 5, 3)):
        table[b, :count] = pages[8 * b : 8 * b + count]
    return table


STEPS = ((np.array([0, 0, 0]), 40), (np.array([40, 33, 17]), 8), (np.array([48, 34, 20]), 5))
"""A prompt's chunk, then blocks of sequences of unequal lengths that took back rows."""


def run_steps(built: TinyPair, made: GraphForm, graph: GraphName) -> tuple[Run, list[Array]]:
    run, logits = Run(built, graph, made, page_table()), []
    ids = np.random.default_rng(1).integers(0, 90, (BATCH, 64))
    for starts, rows in STEPS:
        feeds = {
            "token_ids": ids[:, :rows] + starts[:, None] % 7,
            "cache_start": starts,
            "logit_rows": np.tile(np.arange(rows), (BATCH, 1)),
        }
        logits.append(run(feeds)["logits"].astype(np.float64))
    return run, logits


@pytest.mark.parametrize("graph", ["target", "target_only"])
@pytest.mark.parametrize("name", FORMS)
def test_the_target_computes_what_the_plain_graph_does(
    built: TinyPair, graph: GraphName, name: str
) -> None:
    """FP8 caches against the CPU's FP8 graph, which holds the same numbers as float32."""
    made = form(name)
    precision = Precision.FLOAT32 if made.is_fp8 else made.precision
    reference = GraphForm(precision, LENGTH, cache_dtype=made.cache_dtype)
    want_run, want = run_steps(built, reference, graph)
    got_run, got = run_steps(built, made, graph)
    for step, (mine, other) in enumerate(zip(got, want, strict=True)):
        error = np.abs(mine - other).max() / np.abs(other).max()
        assert error < (0.08 if made.is_fp8 else 0.01), (step, error)
    for key in want_run.caches:
        for b, length in enumerate(STEPS[-1][0] + STEPS[-1][1]):
            mine, other = (run.held(key, b, length) for run in (got_run, want_run))
            assert np.isfinite(mine).all()
            # Where float16 rounds across a midpoint, the E4M3 code is the next one: an eighth.
            error = np.linalg.norm(mine - other) / np.linalg.norm(other)
            assert error < (0.05 if made.is_fp8 else 0.005), (key, b, error)

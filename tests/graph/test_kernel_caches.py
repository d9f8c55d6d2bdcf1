"""Graphs whose caches only kernels read: what they say is what the plain graphs say.

float16 where they run, since ONNX Runtime has no bfloat16 on the CPU. The bodies are the definition
that the kernels are held to; FP8 caches are codes here, and float32 numbers in the CPU's graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from dflash_trt.graph.bindings import GraphName
from dflash_trt.graph.form import CacheDtype, GraphForm, Precision
from tests.covering import exhaustive
from tests.graph.builds import build
from tests.graph.functions import Array
from tests.graph.runner import GraphRunner, tokens
from tests.pairs import TWO_KINDS, PairFactory, TinyPair

LENGTH, SIZE, PAGES, BATCH = 128, 16, 24, 3
PAIRS: dict[str, Callable[[PairFactory], TinyPair]] = {
    "qwen3": lambda make_pair: make_pair(
        "qwen3",
        {"head_dim": 64, "num_layers": 3, "vocab": 97},
        {"head_dim": 64, "num_layers": 2, "target_layer_ids": [0, 2], **TWO_KINDS},
    ),
    # All experts of every row: a router near a tie would choose others for float16's roundings.
    "gpt_oss": lambda make_pair: make_pair(
        "gpt_oss",
        {"head_dim": 64, "num_layers": 2, "vocab": 97, "experts": 4, "chosen": 4},
        {"head_dim": 64, "num_layers": 1, "target_layer_ids": [0, 1]},
    ),
}
FORMS: dict[str, dict[str, Any]] = {
    "paged": {"page_size": SIZE, "pages": PAGES},
    "fp8": {"cache_dtype": CacheDtype.FP8},
    "paged_fp8": {"page_size": SIZE, "pages": PAGES, "cache_dtype": CacheDtype.FP8},
}


@pytest.fixture(params=["qwen3", exhaustive("gpt_oss")])
def built(request: pytest.FixtureRequest, make_pair: PairFactory) -> TinyPair:
    return PAIRS[request.param](make_pair)


def page_table() -> Array:
    """Pages in no order; the last page, nobody's, behind them."""
    pages = np.random.default_rng(0).permutation(PAGES).astype(np.int32)
    table = np.full((BATCH, LENGTH // SIZE), PAGES, np.int32)
    for b, count in enumerate((8, 5, 3)):
        table[b, :count] = pages[8 * b : 8 * b + count]
    return table


TABLE = page_table()
STEPS = ((np.array([0, 0, 0]), 40), (np.array([40, 33, 17]), 8), (np.array([48, 34, 20]), 5))
"""A prompt's chunk, then blocks of sequences of unequal lengths that took back rows."""


def run_steps(
    built: TinyPair, made: GraphForm, graph: GraphName
) -> tuple[GraphRunner, list[Array]]:
    """Rows that nobody wrote are NaN where kernels read: they must not matter."""
    runner = GraphRunner(
        built,
        BATCH,
        LENGTH,
        {graph: build(built, graph, made)},
        page_table=TABLE if made.is_paged else None,
        fill=np.nan if made.has_kernel_caches else 0,
    )
    ids = tokens(90, BATCH, 64, seed=1)
    logits = [
        runner.target(ids[:, :rows] + starts[:, None] % 7, starts, graph=graph)["logits"]
        for starts, rows in STEPS
    ]
    return runner, [one.astype(np.float64) for one in logits]


def read(runner: GraphRunner, made: GraphForm, name: str, b: int, length: int) -> Array:
    """The first rows of a sequence in a cache, [length, H_kv, D] float64."""
    cache, at = runner.caches[name], np.arange(length)
    if made.is_paged:
        return cache[TABLE[b, at // SIZE], at % SIZE].astype(np.float64)
    return cache[b, :, :length].swapaxes(0, 1).astype(np.float64)[..., :64]


@pytest.mark.parametrize("graph", ["target", "target_only"])
@pytest.mark.parametrize("name", FORMS)
def test_the_target_computes_what_the_plain_graph_does(
    built: TinyPair, graph: GraphName, name: str
) -> None:
    """FP8 caches against the CPU's FP8 graph, which holds the same numbers as float32."""
    made = GraphForm(Precision.FLOAT16, LENGTH, **FORMS[name])
    precision = Precision.FLOAT32 if made.is_fp8 else made.precision
    reference = GraphForm(precision, LENGTH, cache_dtype=made.cache_dtype)
    want_run, want = run_steps(built, reference, graph)
    got_run, got = run_steps(built, made, graph)
    for step, (mine, other) in enumerate(zip(got, want, strict=True)):
        error = np.abs(mine - other).max() / np.abs(other).max()
        assert error < (0.08 if made.is_fp8 else 0.01), (step, error)
    for key in want_run.caches:
        for b, length in enumerate(STEPS[-1][0] + STEPS[-1][1]):
            mine, other = (
                read(got_run, made, key, b, length),
                read(want_run, reference, key, b, length),
            )
            assert np.isfinite(mine).all()
            # Where float16 rounds across a midpoint, the E4M3 code is the next one: an eighth.
            error = np.linalg.norm(mine - other) / np.linalg.norm(other)
            assert error < (0.05 if made.is_fp8 else 0.005), (key, b, error)

"""RoPE tables of queries: stored, or made by the graph where contexts are long."""

from __future__ import annotations

import numpy as np
import pytest

from dflash_trt.graph import rope_tables as tables
from dflash_trt.graph import target
from dflash_trt.models.safetensors_header import read_header
from tests.graph.runner import GraphRunner
from tests.pairs import PairFactory, TinyPair

IDS = np.random.default_rng(0).integers(2, 190, (1, 40))


def _run(built: TinyPair) -> list[dict[str, np.ndarray]]:
    runner = GraphRunner(built)
    return [runner.target(IDS, [0]), runner.draft([5], [40], 8)]


def test_scaled_tables_may_be_made_in_the_graph(
    make_pair: PairFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of another size than a power of four, 1/sqrt(D) rounds.
    keywords = {"head_dim": 24, "vocab": 192}
    stored = make_pair("qwen3", {**keywords, "seed": 7})
    monkeypatch.setattr(tables, "MAX_STORED_SCALED", 100)
    made = make_pair("qwen3", {**keywords, "seed": 7}, max_batch=3)
    sizes = [
        (one.bundle.folder / "weights" / "tables.safetensors").stat().st_size
        for one in (stored, made)
    ]
    assert sizes[0] > 1.9 * sizes[1]
    for before, after in zip(_run(stored), _run(made), strict=True):
        for name, values in before.items():
            np.testing.assert_array_equal(after[name], values, name)


def test_columns_that_do_not_turn_are_added_in_the_graph(
    make_pair: PairFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a Gemma 4's layers that see everything a quarter of the pairs turns."""
    keywords = {"vocab": 192, "tie": True}
    trimmed = make_pair("gemma4", {**keywords, "seed": 7})
    for module in (tables, target):
        monkeypatch.setattr(module, "still_columns", lambda spec: 0)
    whole = make_pair("gemma4", {**keywords, "seed": 7}, max_batch=3)
    stored = [
        read_header(one.bundle.folder / "weights" / "tables.safetensors")["rope.target.cos"]
        for one in (trimmed, whole)
    ]
    assert [one.shape[1] for one in stored] == [4, 16]
    for before, after in zip(_run(trimmed), _run(whole), strict=True):
        for name, values in before.items():
            np.testing.assert_array_equal(after[name], values, name)

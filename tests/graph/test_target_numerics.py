"""The target's graphs against transformers, and the injected features against the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import DynamicCache

from dflash_trt.graph.bindings import CHOICE_IDS, LOGITS, GraphName
from tests.graph.runner import BOUND, GraphRunner, chunks, tokens
from tests.graph.variants import NAMES, build
from tests.pairs import PairFactory, TinyPair
from tests.reference.compare import max_relative_error, stack_error
from tests.reference.generate import forward_with_taps

ODD_CHUNKS = (7, 1, 13, 2, 29)
LENGTH = 75


@torch.no_grad()
def reference(target: Any, ids: npt.NDArray[np.int64]) -> tuple[torch.Tensor, Any]:
    """Logits [B,T,V] and the KV cache of ids [B,T]."""
    cache = DynamicCache(config=target.config)
    return target(torch.tensor(ids), past_key_values=cache, use_cache=True).logits, cache


@pytest.mark.parametrize("name", NAMES)
def test_logits_and_kv_of_every_row_and_layer_equal_those_of_transformers(
    make_pair: PairFactory, name: str
) -> None:
    built = build(make_pair, name)
    ids = tokens(192, 2, LENGTH)
    logits, cache = reference(built.reference, ids)
    graphs: tuple[GraphName, ...] = ("target", "target_only")
    for graph in graphs:
        runner = GraphRunner(built, batch=2)
        check_graph(runner, graph, ids, logits, cache)
        if graph == "target":
            check_injection(built, runner, ids)


def check_graph(
    runner: GraphRunner,
    graph: GraphName,
    ids: npt.NDArray[np.int64],
    logits: torch.Tensor,
    cache: Any,
) -> None:
    parts = []
    for start, end in chunks(LENGTH, ODD_CHUNKS):
        outputs = runner.target(ids[:, start:end], [start, start], graph=graph)
        np.testing.assert_array_equal(outputs[CHOICE_IDS], outputs[LOGITS].argmax(-1))
        parts.append(outputs[LOGITS])
    assert max_relative_error(np.concatenate(parts, axis=1), logits) <= BOUND, graph
    for layer, held in enumerate(cache.layers):
        # transformers keeps what the next row may see of a sliding layer.
        rows = slice(LENGTH - held.keys.shape[2], LENGTH)
        for kind, expected in zip("kv", (held.keys, held.values), strict=True):
            got = runner.caches[f"target_{kind}_{layer}"][:, :, rows]
            assert max_relative_error(got, expected) <= BOUND, f"{graph}: {kind} of layer {layer}"


def check_injection(built: TinyPair, runner: GraphRunner, ids: npt.NDArray[np.int64]) -> None:
    """Taps are in every draft layer's cache as the reference projects them."""
    draft = built.reference_draft
    _, taps = forward_with_taps(built.reference, torch.tensor(ids), draft.config.target_layer_ids)
    for layer, projected in enumerate(draft.project(taps)):
        for kind, expected in zip("kv", projected, strict=True):
            cache = runner.caches[f"draft_{kind}_{layer}"]
            assert max_relative_error(cache[:, :, :LENGTH], expected) <= BOUND, f"layer {layer}"
            assert not cache[:, :, LENGTH:].any(), "written past the rows"


@pytest.mark.numeric
def test_a_deep_wide_headed_target_past_its_original_context_keeps_the_bound(
    make_pair: PairFactory,
) -> None:
    target = {
        "num_layers": 12,
        "hidden": 96,
        "heads": 8,
        "kv_heads": 2,
        "head_dim": 64,
        "rope": "llama3",
        "rope_theta": 5e5,
        "dtype": "bfloat16",
    }
    built = make_pair("llama", target, {"rope": "llama3", "rope_theta": 5e5})
    ids = tokens(256, 1, 400)
    runner = GraphRunner(built, length=448)
    parts = [runner.target(ids[:, s:e], [s])[LOGITS] for s, e in chunks(400, (61, 128, 3))]
    expected, _ = reference(built.reference, ids)
    bound = stack_error(12, 900)  # 96 hidden elements, heads of 64, 400 keys
    assert max_relative_error(np.concatenate(parts, axis=1), expected) <= bound

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
from tests.graph.variants import VARIANTS, build
from tests.pairs import PairFactory, TinyPair
from tests.reference.compare import assert_bitwise_equal, max_relative_error, stack_error
from tests.reference.generate import forward_with_taps

pytestmark = pytest.mark.numeric

ODD_CHUNKS = (7, 1, 13, 2, 29)
LENGTH = 75


@torch.no_grad()
def reference(target: Any, ids: npt.NDArray[np.int64]) -> tuple[torch.Tensor, Any]:
    """Logits [B,T,V] and the KV cache of ids [B,T]."""
    cache = DynamicCache(config=target.config)
    return target(torch.tensor(ids), past_key_values=cache, use_cache=True).logits, cache


@pytest.mark.parametrize("graph", ["target", "target_only"])
@pytest.mark.parametrize("name", VARIANTS)
def test_logits_and_kv_of_every_row_and_layer_equal_those_of_transformers(
    make_pair: PairFactory, name: str, graph: GraphName
) -> None:
    built = build(make_pair, name)
    ids = tokens(192, 2, LENGTH)
    runner = GraphRunner(built, batch=2)
    parts = []
    for start, end in chunks(LENGTH, ODD_CHUNKS):
        outputs = runner.target(ids[:, start:end], [start, start], graph=graph)
        np.testing.assert_array_equal(outputs[CHOICE_IDS], outputs[LOGITS].argmax(-1))
        parts.append(outputs[LOGITS])
    logits, cache = reference(built.reference, ids)
    assert max_relative_error(np.concatenate(parts, axis=1), logits) <= BOUND
    for layer, held in enumerate(cache.layers):
        # transformers keeps what the next row may see of a sliding layer.
        rows = slice(LENGTH - held.keys.shape[2], LENGTH)
        for kind, expected in zip("kv", (held.keys, held.values), strict=True):
            got = runner.caches[f"target_{kind}_{layer}"][:, :, rows]
            assert max_relative_error(got, expected) <= BOUND, f"{kind} of layer {layer}"
    if graph == "target":
        check_injection(built, runner, ids)


def check_injection(built: TinyPair, runner: GraphRunner, ids: npt.NDArray[np.int64]) -> None:
    """Taps are in every draft layer's cache as the reference projects them."""
    draft = built.reference_draft
    _, taps = forward_with_taps(built.reference, torch.tensor(ids), draft.config.target_layer_ids)
    for layer, projected in enumerate(draft.project(taps)):
        for kind, expected in zip("kv", projected, strict=True):
            cache = runner.caches[f"draft_{kind}_{layer}"]
            assert max_relative_error(cache[:, :, :LENGTH], expected) <= BOUND, f"layer {layer}"
            assert not cache[:, :, LENGTH:].any(), "written past the rows"


@pytest.mark.parametrize("graph", ["target", "target_only"])
def test_sequences_of_one_call_stand_at_positions_of_their_own(
    make_pair: PairFactory, graph: GraphName
) -> None:
    built = make_pair()
    ids = tokens(256, 3, 48)
    starts = [0, 31, 9]
    runner = GraphRunner(built, batch=3)
    for position in range(max(starts)):
        # Sequences whose prefix is complete run on; their extra rows are overwritten later.
        runner.target(ids[:, position : position + 1], [position] * 3, graph=graph)
    rows = np.stack([ids[b, s : s + 17] for b, s in enumerate(starts)])
    logits = runner.target(rows, starts, graph=graph)[LOGITS]
    expected, _ = reference(built.reference, ids)
    for b, start in enumerate(starts):
        assert max_relative_error(logits[b], expected[b, start : start + 17]) <= BOUND


@pytest.mark.parametrize("graph", ["target", "target_only"])
def test_logit_rows_pick_rows_in_any_order_and_number(
    make_pair: PairFactory, graph: GraphName
) -> None:
    built = make_pair()
    ids = tokens(256, 2, 9)
    everything = GraphRunner(built, batch=2).target(ids, [0, 0], graph=graph)[LOGITS]
    for picked in ([[8], [0]], [[3, 3, 1], [7, 0, 8]], [[8, 7, 6, 5], [0, 2, 4, 6]]):
        rows = np.array(picked, np.int64)
        outputs = GraphRunner(built, batch=2).target(ids, [0, 0], graph=graph, logit_rows=rows)
        expected = np.take_along_axis(everything, rows[:, :, None], axis=1)
        assert_bitwise_equal(outputs[LOGITS], expected, f"rows {picked}")
        np.testing.assert_array_equal(outputs[CHOICE_IDS], expected.argmax(-1))


@pytest.mark.parametrize("length", [33, 64, 100, 257])
def test_any_cache_length_that_holds_the_rows_will_do(make_pair: PairFactory, length: int) -> None:
    built = make_pair()
    ids = tokens(256, 1, 33)
    logits = GraphRunner(built, length=length).target(ids, [0])[LOGITS]
    assert max_relative_error(logits, reference(built.reference, ids)[0]) <= BOUND


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

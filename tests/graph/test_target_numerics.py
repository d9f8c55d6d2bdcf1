"""The target's graphs against transformers, and the injected features against the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import DynamicCache

from dflash_trt.backends.base import Scores, TargetCall, TargetGraph
from dflash_trt.graph.bindings import CHOICE_IDS, LOGITS, GraphName
from tests.backends.steps import begin, speculate_until
from tests.covering import exhaustive
from tests.graph.runner import BOUND, GraphRunner, chunks, tokens
from tests.graph.variants import NAMES, build
from tests.pairs import PairFactory, TinyPair
from tests.reference.checkpoints import Family
from tests.reference.compare import max_relative_error, stack_error
from tests.reference.generate import forward_with_taps, greedy

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


HYBRID_LENGTH, BATCH = 150, 2
HYBRID_CHUNKS = (7, 1, 40, 2, 29)
HYBRID_BOUND = 1e-3
"""transformers runs 64 rows at once, which rounds otherwise than row by row."""
HYBRIDS: dict[str, tuple[Family, dict[str, Any], dict[str, Any]]] = {
    "published-bfloat16": (
        "qwen3_5",
        {"dtype": "bfloat16", "vision": True, "head_dim": 32},
        {"target_layer_ids": [0, 3, 5], "dtype": "bfloat16"},
    ),
    "text-float32-tied-sharded": (
        "qwen3_5",
        {"tie": True, "shards": 3, "head_dim": 64, "kv_heads": 1, "linear": (1, 3, 32)},
        {"target_layer_ids": [2, 4], "heads": 2, "kv_heads": 1, "head_dim": 32},
    ),
    "mixture-published-bfloat16": (
        "qwen3_5_moe",
        {"dtype": "bfloat16", "vision": True, "head_dim": 32, "intermediate": 40, "shared": 24},
        {"target_layer_ids": [1, 3, 5], "dtype": "bfloat16"},
    ),
    "mixture-text-float32-separate-sharded": (
        "qwen3_5_moe",
        {"separate": True, "shards": 3, "head_dim": 32, "experts": 5, "chosen": 1},
        {"target_layer_ids": [4, 0]},
    ),
}
DAILY_HYBRIDS = {"published-bfloat16", "mixture-text-float32-separate-sharded"}


@pytest.mark.parametrize("graph", ["target", "target_only"])
@pytest.mark.parametrize("name", [n if n in DAILY_HYBRIDS else exhaustive(n) for n in HYBRIDS])
def test_hybrids_logits_and_features_equal_those_of_transformers(
    make_pair: PairFactory, name: str, graph: TargetGraph
) -> None:
    family, target, draft = HYBRIDS[name]
    built = make_pair(family, {"vocab": 192, **target}, draft)
    ids, executor, parts = tokens(192, BATCH, HYBRID_LENGTH), built.open(), []
    for start, end in chunks(HYBRID_LENGTH, HYBRID_CHUNKS):
        picked = np.tile(np.arange(end - start), (BATCH, 1))
        rows, starts = ids[:, start:end], np.full(BATCH, start)
        output = executor.forward(TargetCall(graph, 0, rows, starts, picked, Scores.LOGITS))
        assert output.logits is not None
        parts.append(output.logits.copy())
    given = torch.tensor(ids)
    reference = built.reference
    with torch.no_grad():
        want = reference(given).logits
    assert max_relative_error(np.concatenate(parts, axis=1), want) <= HYBRID_BOUND
    if graph == "target_only":
        return
    projection = built.reference_draft
    taps = forward_with_taps(reference, given, projection.config.target_layer_ids)[1]
    for layer, kept in enumerate(projection.project(taps)):
        for kind, expected in zip("kv", kept, strict=True):
            held = [
                executor.caches.read_row(f"draft_{kind}_{layer}", slot, HYBRID_LENGTH - 1)
                for slot in range(BATCH)
            ]
            assert max_relative_error(np.stack(held), expected[:, :, -1]) <= HYBRID_BOUND


PROMPTS = ([3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8], [31] * 3 + [8, 9] * 30, [40])
PAIRS: dict[str, dict[str, Any]] = {
    "llama": {
        "family": "llama",
        "target": {"vocab": 64, "dtype": "bfloat16", "tie": True, "rope": "llama3", "shards": 2},
        "draft": {"dtype": "bfloat16"},
        "fit_steps": 60,
    },
    "gpt_oss": {
        "family": "gpt_oss",
        "target": {"vocab": 64, "mxfp4": True, "rope": "yarn", "num_layers": 4},
        "fit_steps": 60,
    },
}


@pytest.mark.parametrize("name", ["llama", exhaustive("gpt_oss")])
def test_speculation_emits_the_tokens_that_transformers_does(
    make_pair: PairFactory, name: str
) -> None:
    """Ragged prompts, block sizes in turn; past gpt-oss's window of 24."""
    built, count = make_pair(**PAIRS[name]), 60
    executor = built.open()
    sequences = [begin(executor, list(p), slot, (5, 3)) for slot, p in enumerate(PROMPTS)]
    speculate_until(executor, sequences, count, range(2, 9))
    for prompt, sequence in zip(PROMPTS, sequences, strict=True):
        expected = greedy(built.reference, prompt, count)
        assert expected.smallest_gap > 1e-4, "a near tie: choose another seed"
        assert sequence.output[:count] == expected.tokens
        rows = zip(sequence.logits[:count], expected.logits, strict=True)
        assert max(max_relative_error(*row) for row in rows) <= stack_error(6)
    assert sum(sum(one.accepted) for one in sequences) > 30, "drafts were hardly ever accepted"

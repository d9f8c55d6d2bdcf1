"""Hybrid targets against transformers: logits of every row, and the features that drafts get."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from dflash_trt.backends.base import Scores, TargetCall, TargetGraph
from tests.covering import exhaustive
from tests.graph.runner import chunks, tokens
from tests.pairs import PairFactory
from tests.reference.checkpoints import Family
from tests.reference.compare import max_relative_error
from tests.reference.generate import forward_with_taps

LENGTH, BATCH = 150, 2
CHUNKS = (7, 1, 40, 2, 29)
BOUND = 1e-3
"""transformers runs 64 rows at once, which rounds otherwise than row by row."""
VARIANTS: dict[str, tuple[Family, dict[str, Any], dict[str, Any]]] = {
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
DAILY = {"published-bfloat16", "mixture-text-float32-separate-sharded"}


@pytest.mark.parametrize("graph", ["target", "target_only"])
@pytest.mark.parametrize("name", [one if one in DAILY else exhaustive(one) for one in VARIANTS])
def test_logits_and_features_of_every_row_equal_those_of_transformers(
    make_pair: PairFactory, name: str, graph: TargetGraph
) -> None:
    family, target, draft = VARIANTS[name]
    built = make_pair(family, {"vocab": 192, **target}, draft)
    ids, executor, parts = tokens(192, BATCH, LENGTH), built.open(), []
    for start, end in chunks(LENGTH, CHUNKS):
        picked = np.tile(np.arange(end - start), (BATCH, 1))
        rows, starts = ids[:, start:end], np.full(BATCH, start)
        output = executor.forward(TargetCall(graph, 0, rows, starts, picked, Scores.LOGITS))
        assert output.logits is not None
        parts.append(output.logits.copy())
    given = torch.tensor(ids)
    reference = built.reference
    with torch.no_grad():
        want = reference(given).logits
    assert max_relative_error(np.concatenate(parts, axis=1), want) <= BOUND
    if graph == "target_only":
        return
    projection = built.reference_draft
    taps = forward_with_taps(reference, given, projection.config.target_layer_ids)[1]
    for layer, kept in enumerate(projection.project(taps)):
        for kind, expected in zip("kv", kept, strict=True):
            held = [
                executor.caches.read_row(f"draft_{kind}_{layer}", slot, LENGTH - 1)
                for slot in range(BATCH)
            ]
            assert max_relative_error(np.stack(held), expected[:, :, -1]) <= BOUND

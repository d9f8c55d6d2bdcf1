"""Engines of mixtures of experts: gathered experts, sinks and windows build for sm_120."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dflash_trt.graph.form import Precision
from tests.backends.tensorrt.build.conftest import BuildEngines
from tests.covering import exhaustive
from tests.pairs import PairFactory

TWO_TAPS = {"target_layer_ids": [0, 1]}
CASES: dict[str, tuple[str, dict[str, Any], Precision]] = {
    "gpt_oss-bf16": ("gpt_oss", {"dtype": "bfloat16", "rope": "yarn"}, Precision.BFLOAT16),
    "gpt_oss-mxfp4-fp16": ("gpt_oss", {"mxfp4": True, "rope": "yarn"}, Precision.FLOAT16),
    "qwen3_moe-bf16": ("qwen3_moe", {"dtype": "bfloat16"}, Precision.BFLOAT16),
}


@pytest.mark.parametrize(
    "name", [exhaustive("gpt_oss-bf16"), "gpt_oss-mxfp4-fp16", "qwen3_moe-bf16"]
)
def test_engines_of_mixtures(
    make_pair: PairFactory, build_engines: BuildEngines, name: str
) -> None:
    family, target, precision = CASES[name]
    pair = make_pair(family, {"head_dim": 64, "num_layers": 2, **target}, TWO_TAPS).pair
    bundle = build_engines(pair, precision)
    draft = pair.draft.num_layers
    wanted = {"target": (2, 4 + 2 * draft), "draft": (draft, 2 * draft), "target_only": (2, 4)}
    has_sinks = family == "gpt_oss"
    for engine in bundle.manifest.engines.files:
        assert (engine.fused_attentions, engine.cache_updates) == wanted[engine.graph]
        summary = json.loads((bundle.folder / engine.summary).read_text())
        caches = {t["name"]: t["shape"] for t in summary["inputs"] if len(t["shape"]) == 4}
        for cache, shape in caches.items():
            room = has_sinks and cache.startswith("target")
            assert shape[2:] == [272 if has_sinks else 256, 72 if room else 64]
        routers = 0 if engine.graph == "draft" else 2
        assert summary["layers"].get("SOFTMAX", 0) == routers

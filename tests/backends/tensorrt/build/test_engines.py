"""Real engines, built here for GPUs that are not: what is in them, and what they weigh."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dflash_trt.backends.tensorrt.build.builder import EngineOptions, check_buildable
from dflash_trt.backends.tensorrt.library import find_arch
from dflash_trt.bundle.bundle import Bundle, verify_bundle
from dflash_trt.errors import DflashError
from dflash_trt.graph.form import GraphForm, Precision
from dflash_trt.models.draft import read_draft
from dflash_trt.models.pair_check import Pair, check_pair
from dflash_trt.models.target import read_target
from tests.backends.tensorrt.build.conftest import BuildEngines, RecordedProgress
from tests.covering import exhaustive
from tests.pairs import TWO_KINDS, PairFactory

TWO_TAPS = {"target_layer_ids": [0, 1]}
BF16, FP16 = Precision.BFLOAT16, Precision.FLOAT16
GPT_OSS = {"head_dim": 64, "rope": "yarn"}
LLAMA = {"head_dim": 128, "heads": 2, "kv_heads": 2, "dtype": "bfloat16", "attention_bias": True}
# Family, head size, GQA and storage type, sliding layers, compute type, architecture.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], Precision, str]] = {
    "qwen3-64-fp16": (
        "qwen3",
        {"head_dim": 64, "heads": 4, "kv_heads": 1, "dtype": "bfloat16"},
        {"dtype": "bfloat16", **TWO_KINDS},
        FP16,
        "sm_120",
    ),
    "gpt_oss-mxfp4-64-fp16": ("gpt_oss", {**GPT_OSS, "mxfp4": True}, {}, FP16, "sm_120"),
    "llama-128-bf16": (
        "llama",
        LLAMA,
        {"dtype": "bfloat16", "kv_heads": 1, "heads": 2, **TWO_KINDS},
        BF16,
        "sm_120",
    ),
    "demo-like-32-bf16": (
        "qwen3",
        {"head_dim": 32, "heads": 2, "kv_heads": 1, "tie": True, "rope": "llama3"},
        {"heads": 4, "kv_heads": 2},
        BF16,
        "sm_121",
    ),
    "qwen3_moe-64-bf16": ("qwen3_moe", {"head_dim": 64, "dtype": "bfloat16"}, {}, BF16, "sm_120"),
    "gemma3-64-bf16": ("gemma3", {"head_dim": 64, "dtype": "bfloat16"}, {}, BF16, "sm_120"),
}
EXHAUSTIVE = 5
"""As many of them, the last ones."""


@pytest.fixture(
    scope="module",
    params=[*list(CASES)[:-EXHAUSTIVE], *map(exhaustive, list(CASES)[-EXHAUSTIVE:])],
)
def case(
    request: pytest.FixtureRequest, make_pair: PairFactory, build_engines: BuildEngines
) -> tuple[Pair, Bundle, RecordedProgress, Precision, str]:
    family, target, draft, precision, arch = CASES[request.param]
    built = make_pair(family, {"num_layers": 2, **target}, {**TWO_TAPS, **draft})
    progress = RecordedProgress()
    bundle = build_engines(built.pair, precision, arch, progress=progress)
    return built.pair, bundle, progress, precision, arch


def test_attention_and_caches_are_native(case: Any) -> None:
    """Softmax is left to routers; where there are sinks, caches have room for them."""
    pair, bundle, _, precision, arch = case
    draft = pair.draft.num_layers
    expected = {
        "target": (2, 2 * 2 + 2 * draft),
        "draft": (draft, 2 * draft),
        "target_only": (2, 4),
    }
    manifest, experts = bundle.manifest, pair.target.sizes.experts
    has_sinks = pair.target.sizes.layers[0].has_sinks
    assert manifest.engines.arch == arch
    assert manifest.compute_dtype == precision.value
    for engine in manifest.engines.files:
        assert (engine.fused_attentions, engine.cache_updates) == expected[engine.graph]
        summary = json.loads((bundle.folder / engine.summary).read_text())
        layers = summary["layers"]
        assert layers["ATTENTION_INPUT"] == engine.fused_attentions
        assert layers["KV_CACHE_UPDATE"] == engine.cache_updates
        routers = 2 if experts and engine.graph != "draft" else 0
        assert layers.get("SOFTMAX", 0) == routers and "RAGGED_SOFTMAX" not in layers
        assert sum(layers.values()) == engine.layers
        kind = {"float16": "HALF", "bfloat16": "BF16"}[precision.value]
        caches = [t for t in summary["inputs"] if len(t["shape"]) == 4]
        assert caches and {t["dtype"] for t in caches} == {kind}
        for cache in caches:
            room = 8 if has_sinks and cache["name"].startswith("target") else 0
            owner = pair.target if cache["name"].startswith("target") else pair.draft
            slots, _, length, size = cache["shape"]
            assert (slots, length) == ("B", 272 if has_sinks else 256)
            assert size == owner.sizes.layers[0].head_dim + room
        if engine.graph != "draft":
            assert {t["name"]: t["dtype"] for t in summary["outputs"]}["logits"] == "FLOAT"
            assert summary["profiles"]["prefill"] == {
                "B": [1, 1, 1],
                "S": [1, 64, 64],
                "R": [1, 1, 8],
            }
            assert summary["profiles"]["decode"]["B"] == [1, 1, 2]
        else:
            assert summary["profiles"] == {"decode": {"B": [1, 1, 2], "S": [2, 8, 8]}}


def test_a_bundle_of_engines_is_checked_like_any_other(case: Any) -> None:
    _, bundle, _, _, arch = case
    lines = verify_bundle(bundle, lambda _: None)
    for graph in ("target", "draft", "target_only"):
        assert f"engines/tensorrt-rtx-{arch}/{graph}.engine: sha256 matches" in lines
    assert bundle.manifest.libraries["tensorrt_rtx"] == bundle.manifest.engines.library_version


def test_progress_reaches_the_end(case: Any) -> None:
    progress = case[2]
    steps = [
        (name, total, reached)
        for (name, total, unit), reached in zip(progress.stages, progress.reached, strict=True)
        if unit == "steps"
    ]
    assert [name.split()[0] for name, _, _ in steps] == ["target", "draft", "target_only"]
    for _, total, reached in steps:
        assert total // 2 < reached <= total


@pytest.mark.exhaustive
def test_a_markov_chain_builds_beside_native_attention(
    make_pair: PairFactory, build_engines: BuildEngines, tmp_path: Path
) -> None:
    """DSpark: the draft's engine chooses slot by slot, each with what the one before it chose."""
    import torch

    from tests.reference.deepspec import write_deepspec

    base = make_pair("qwen3", {"head_dim": 64, "num_layers": 2}, {**TWO_TAPS, **TWO_KINDS})
    target, written = base.folder / "target", base.folder / "draft"
    factors = torch.randn(2, base.pair.target.vocab_size, 16)
    draft = write_deepspec(tmp_path / "draft", written, target, (factors[0], factors[1]))
    pair = check_pair(read_target(target), read_draft(draft))
    assert pair.draft.kind == "DSpark"
    bundle = build_engines(pair, BF16)
    engines = bundle.manifest.engines
    assert engines is not None and engines.arch == "sm_120"
    layers = {
        one.graph: json.loads((bundle.folder / one.summary).read_text())["layers"]
        for one in engines.files
    }
    assert layers["draft"]["TOPK"] == pair.draft.block_size - 1
    for one in engines.files:
        held = {"target": 2 + pair.draft.num_layers, "draft": pair.draft.num_layers}
        assert one.cache_updates == 2 * held.get(one.graph, 2)
        assert layers[one.graph]["ATTENTION_INPUT"] == one.fused_attentions == 2
        assert "SOFTMAX" not in layers[one.graph]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("heads", "precision"), [(4, BF16), (2, FP16)])
def test_a_chain_builds_with_native_attention(
    heads: int,
    precision: Precision,
    make_pair: PairFactory,
    build_engines: BuildEngines,
    tmp_path: Path,
) -> None:
    """EAGLE-3: seven steps in the draft's engine, each an attention of TensorRT's own."""
    from tests.reference.eagle import write_eagle

    target = make_pair("qwen3", {"head_dim": 64, "num_layers": 2}, TWO_TAPS).folder / "target"
    draft = write_eagle(tmp_path / "draft", target, taps=(0, 1), heads=heads)
    bundle = build_engines(check_pair(read_target(target), read_draft(draft)), precision)
    engines = bundle.manifest.engines
    assert engines is not None and engines.arch == "sm_120"
    found = {}
    for one in engines.files:
        found[one.graph] = (one.fused_attentions, one.cache_updates)
        summary = json.loads((bundle.folder / one.summary).read_text())
        layers, inputs = summary["layers"], summary["inputs"]
        assert layers["ATTENTION_INPUT"] == one.fused_attentions and "SOFTMAX" not in layers
        assert layers["KV_CACHE_UPDATE"] == one.cache_updates
        if one.graph != "target_only":  # room for a sink, and features as if of one more layer
            held = [tuple(t["shape"][1:]) for t in inputs if t["name"].startswith("draft_")]
            assert held == 2 * [(heads // 2, 256, 16 + 8)] + 2 * [(1, 256, 32)]
    assert found == {"target": (2, 4 + 4), "draft": (7, 4), "target_only": (2, 4)}


@pytest.mark.exhaustive
def test_recurrent_layers_build_in_groups(
    make_pair: PairFactory, build_engines: BuildEngines
) -> None:
    """A loop for each, whose state and rows TensorRT updates in place like K and V."""
    target = {"head_dim": 32, "num_layers": 4}
    pair = make_pair("qwen3_5", target, {"head_dim": 64, "target_layer_ids": [0, 3]}).pair
    bundle = build_engines(pair, BF16)
    engines = bundle.manifest.engines
    assert engines is not None and engines.arch == "sm_120"
    for one in engines.files:
        summary = json.loads((bundle.folder / one.summary).read_text())
        layers = summary["layers"]
        assert "SOFTMAX" not in layers and layers["KV_CACHE_UPDATE"] == one.cache_updates
        if one.graph != "draft":
            assert one.operations["gated_delta_groups"] == "function"
            assert layers["RECURRENCE"] == layers["TRIP_LIMIT"] == 3
            assert one.fused_attentions == 1
            kinds = {t["name"]: t["dtype"] for t in summary["inputs"]}
            assert kinds["target_state_0"] == kinds["target_rows_0"] == "FLOAT"
            assert {"state_start", "rows_end"} <= kinds.keys()


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["gemma4", "gemma4_moe"])
def test_heads_of_512_build_decomposed(
    family: str, make_pair: PairFactory, build_engines: BuildEngines
) -> None:
    """Those of 256 beside them have fused attention, and both kinds caches of their own shape."""
    target = {"head_dim": 256, "num_layers": 3, "tie": True}
    bundle = build_engines(make_pair(family, target, {"head_dim": 64, **TWO_TAPS}).pair, BF16)
    engines = bundle.manifest.engines
    assert engines is not None and engines.arch == "sm_120"
    for one in engines.files:
        summary = json.loads((bundle.folder / one.summary).read_text())
        assert one.fused_attentions == 2
        if one.graph != "draft":
            routers = 3 * (family == "gemma4_moe")
            assert one.operations["decomposed_attention_4_1_512"] == "function"
            assert summary["layers"]["SOFTMAX"] == 1 + routers
            shapes = {t["name"]: t["shape"][1:] for t in summary["inputs"]}
            assert shapes["target_k_1"] == [2, 256, 256]
            assert shapes["target_k_2"] == [1, 256, 512]


@pytest.mark.parametrize(
    ("arguments", "limits", "message"),
    [
        (
            ("qwen3", {"head_dim": 36, "num_layers": 2}, {"head_dim": 64, **TWO_TAPS}),
            {},
            r"target's head size 36 .* multiples of 8 from 16 to 256",
        ),
        (
            ("qwen3", {"head_dim": 64, "num_layers": 2}, TWO_TAPS),
            {"max_batch": 1 << 20, "max_seq_len": 2048},
            "exceed the largest sm_120 device, 96,000,000,000 bytes",
        ),
        (
            ("gpt_oss", {"head_dim": 64, "num_layers": 2}, TWO_TAPS),
            {"max_batch": 200_000, "max_seq_len": 16},
            r" 176,947,200,000 of experts gathered for 1600000 rows exceed .* sm_120",
        ),
    ],
    ids=["head size", "caches", "gathered experts"],
)
def test_what_cannot_be_built_is_refused(
    make_pair: PairFactory,
    build_engines: BuildEngines,
    arguments: Any,
    limits: dict[str, int],
    message: str,
) -> None:
    pair = make_pair(*arguments).pair
    with pytest.raises(DflashError, match=message):
        build_engines(pair, Precision.BFLOAT16, **limits)


def test_head_sizes_of_both_models_need_kernels(make_pair: PairFactory) -> None:
    pair = make_pair("qwen3", {"head_dim": 64, "num_layers": 2}, {"head_dim": 36, **TWO_TAPS}).pair
    options = EngineOptions(find_arch("sm_120"), Precision.BFLOAT16)
    with pytest.raises(DflashError, match="draft's head size 36 has no kernel"):
        check_buildable(pair, options, GraphForm(Precision.BFLOAT16, page_size=16))

"""Real engines, built here for GPUs that are not: what is in them, and what they weigh."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_trt.backends.tensorrt.build.builder import EngineOptions, check_buildable
from dflash_trt.backends.tensorrt.library import find_arch
from dflash_trt.bundle.bundle import Bundle, verify_bundle
from dflash_trt.cli.inspect import describe_bundle
from dflash_trt.errors import DflashError
from dflash_trt.graph.form import GraphForm, Precision
from dflash_trt.models.draft import read_draft
from dflash_trt.models.pair_check import Pair, check_pair
from dflash_trt.models.quantized_weights import quantized_linears
from dflash_trt.models.target import read_target
from tests.backends.tensorrt.build.conftest import BuildEngines
from tests.covering import exhaustive
from tests.pairs import TWO_KINDS, PairFactory
from tests.reference.deepspec import write_deepspec
from tests.reference.dflash2 import write_dflash2
from tests.reference.eagle import write_eagle
from tests.reference.quantized import Algorithm

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
) -> tuple[Pair, Bundle, Precision, str]:
    family, target, draft, precision, arch = CASES[request.param]
    built = make_pair(family, {"num_layers": 2, **target}, {**TWO_TAPS, **draft})
    return built.pair, build_engines(built.pair, precision, arch), precision, arch


def summaries(bundle: Bundle) -> dict[str, tuple[Any, dict[str, Any]]]:
    """What a manifest says of each engine, and the whole list of its network."""
    engines = bundle.manifest.engines
    assert engines is not None
    return {
        one.graph: (one, json.loads((bundle.folder / one.summary).read_text()))
        for one in engines.files
    }


def test_attention_and_caches_are_native(case: Any) -> None:
    """Softmax is left to routers; where there are sinks, caches have room for them."""
    pair, bundle, precision, arch = case
    draft, has_sinks = pair.draft.num_layers, pair.target.sizes.layers[0].has_sinks
    expected = {"target": (2, 4 + 2 * draft), "draft": (draft, 2 * draft), "target_only": (2, 4)}
    manifest, experts = bundle.manifest, pair.target.sizes.experts
    assert (manifest.engines.arch, manifest.compute_dtype) == (arch, precision.value)
    for graph, (engine, summary) in summaries(bundle).items():
        layers = summary["layers"]
        assert (engine.fused_attentions, engine.cache_updates) == expected[graph]
        assert (layers["ATTENTION_INPUT"], layers["KV_CACHE_UPDATE"]) == expected[graph]
        routers = 2 if experts and graph != "draft" else 0
        assert layers.get("SOFTMAX", 0) == routers and "RAGGED_SOFTMAX" not in layers
        assert sum(layers.values()) == engine.layers
        caches = [t for t in summary["inputs"] if len(t["shape"]) == 4]
        kind = {"float16": "HALF", "bfloat16": "BF16"}[precision.value]
        assert caches and {t["dtype"] for t in caches} == {kind}
        for cache in caches:
            is_target = cache["name"].startswith("target")
            room, owner = 8 * (has_sinks and is_target), pair.target if is_target else pair.draft
            slots, _, length, size = cache["shape"]
            assert (slots, length) == ("B", 272 if has_sinks else 256)
            assert size == owner.sizes.layers[0].head_dim + room
        decode = {"B": [1, 1, 2], "S": [2, 8, 8]}
        if graph == "draft":
            assert summary["profiles"] == {"decode": decode}
        else:
            assert {t["name"]: t["dtype"] for t in summary["outputs"]}["logits"] == "FLOAT"
            prefill = {"B": [1, 1, 1], "S": [1, 64, 64], "R": [1, 1, 8]}
            assert summary["profiles"]["prefill"] == prefill


def test_a_bundle_of_engines_is_checked_like_any_other(case: Any) -> None:
    _, bundle, _, arch = case
    lines = verify_bundle(bundle, lambda _: None)
    for graph in ("target", "draft", "target_only"):
        assert f"engines/tensorrt-rtx-{arch}/{graph}.engine: sha256 matches" in lines
    assert bundle.manifest.libraries["tensorrt_rtx"] == bundle.manifest.engines.library_version


def of_family(family: str, target: dict[str, Any], taps: list[int]) -> Any:
    draft = {"head_dim": 64, "target_layer_ids": taps}
    return lambda make_pair, folder: make_pair(family, target, draft).pair


def markov(make_pair: PairFactory, folder: Path) -> Pair:
    """DSpark: the draft's engine chooses slot by slot, each with what the one before it chose."""
    base = make_pair("qwen3", {"head_dim": 64, "num_layers": 2}, {**TWO_TAPS, **TWO_KINDS})
    target, factors = base.folder / "target", torch.randn(2, base.pair.target.vocab_size, 16)
    factors = factors[0], factors[1]
    draft = write_deepspec(folder / "draft", base.folder / "draft", target, factors)
    return check_pair(read_target(target), read_draft(draft))


def walk(make_pair: PairFactory, folder: Path) -> Pair:
    """DFlash 2: candidates by two TOPKs, of scores and of tokens, and one choice of all slots."""
    base = make_pair("qwen3", {"head_dim": 64, "num_layers": 2}, {**TWO_TAPS, **TWO_KINDS})
    draft = write_dflash2(folder / "draft", base.folder / "draft")
    return check_pair(base.pair.target, read_draft(draft))


def eagle(make_pair: PairFactory, folder: Path) -> Pair:
    """EAGLE-3: seven steps in the draft's engine, each an attention of TensorRT's own."""
    target = make_pair("qwen3", {"head_dim": 64, "num_layers": 2}, TWO_TAPS).folder / "target"
    draft = write_eagle(folder / "draft", target, taps=(0, 1), heads=4)
    return check_pair(read_target(target), read_draft(draft))


GEMMA = {"head_dim": 256, "num_layers": 3, "tie": True}
DECOMPOSED = {"decomposed_attention_4_1_512": "function"}
KINDS: dict[str, tuple[Any, dict[str, tuple[int, int]], dict[str, int], dict[str, str]]] = {
    "markov": (markov, {"target": (2, 8), "draft": (2, 4), "target_only": (2, 4)}, {}, {}),
    "walk": (walk, {"target": (2, 8), "draft": (2, 4)}, {}, {}),
    "eagle": (eagle, {"target": (2, 8), "draft": (7, 4), "target_only": (2, 4)}, {}, {}),
    # A loop for each recurrent layer, whose state and rows TensorRT updates in place like K and V.
    "recurrent": (
        of_family("qwen3_5", {"head_dim": 32, "num_layers": 4}, [0, 3]),
        {"target": (1, 12), "target_only": (1, 8)},
        {"RECURRENCE": 3, "TRIP_LIMIT": 3},
        {"gated_delta_groups": "function"},
    ),
    "gemma4": (
        of_family("gemma4", GEMMA, [0, 1]),
        {"target": (2, 10), "target_only": (2, 6)},
        {"SOFTMAX": 1},
        DECOMPOSED,
    ),
    "gemma4_moe": (
        of_family("gemma4_moe", GEMMA, [0, 1]),
        {"target_only": (2, 6)},
        {"SOFTMAX": 1 + 3},
        DECOMPOSED,
    ),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_model_builds(
    name: str, make_pair: PairFactory, build_engines: BuildEngines, tmp_path: Path
) -> None:
    make, native, layers, operations = KINDS[name]
    pair = make(make_pair, tmp_path)
    found = summaries(build_engines(pair, BF16))
    for graph, wanted in native.items():
        engine, summary = found[graph]
        assert (engine.fused_attentions, engine.cache_updates) == wanted
        counted = {"SOFTMAX": 0} | layers
        assert {kind: summary["layers"].get(kind, 0) for kind in counted} == counted
        assert operations.items() <= engine.operations.items()
    if name in ("markov", "walk"):
        choices = {"markov": pair.draft.block_size - 1, "walk": 1 + 2}
        assert found["draft"][1]["layers"]["TOPK"] == choices[name]


QUANTIZED: dict[str, tuple[str, Any, Any, Algorithm, Precision, str]] = {
    "nvfp4": ("qwen3", {"head_dim": 64, "dtype": "bfloat16"}, {}, "NVFP4", BF16, "sm_120"),
    "fp8": ("llama", LLAMA, {"heads": 2, "kv_heads": 1}, "FP8", FP16, "sm_89"),
}


def quantize(algorithm: Algorithm) -> dict[str, Any]:
    target = {"algorithm": algorithm, "kv_cache": True, "exclude": ["model.embed_tokens"]}
    return {"target": target, "draft": {"algorithm": algorithm, "form": "nested"}}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", QUANTIZED)
def test_every_quantised_linear_becomes_a_quantised_product(
    make_pair: PairFactory, build_engines: BuildEngines, name: str
) -> None:
    """The target's graph injects what the draft's would, and both read the output head."""
    family, target, draft, algorithm, precision, arch = QUANTIZED[name]
    draft = {**TWO_TAPS, **TWO_KINDS, **draft}
    built = make_pair(family, {"num_layers": 2, **target}, draft, quantize=quantize(algorithm))
    bundle = build_engines(built.pair, precision, arch)
    own = quantized_linears(built.pair.target.weights)
    drafts = quantized_linears(built.pair.draft.weights)
    injected = [role for role in drafts if role.endswith(("fc", "k_proj", "v_proj"))]
    expected = {"target": len(own) + len(injected), "target_only": len(own)}
    expected["draft"] = len(drafts) - ("fc" in drafts) + ("lm_head" in own)
    for graph, (engine, summary) in summaries(bundle).items():
        assert engine.quantized_products == {algorithm: expected[graph]}
        assert engine.fused_attentions == 2
        assert set(summary["quantized_products"].values()) == {algorithm}
        kind = "DYNAMIC_QUANTIZE" if algorithm == "NVFP4" else "QUANTIZE"
        assert summary["layers"][kind] == expected[graph]
    shown = "\n".join(describe_bundle(bundle.manifest))
    assert f"15 linears in {algorithm}; excluded model.embed_tokens; FP8 KV cache not" in shown
    assert f"{expected['target']} {algorithm} products" in shown


@pytest.mark.parametrize(
    ("algorithm", "arch", "able"),
    [("FP8", "sm_86", "sm_120, sm_121, sm_89"), ("NVFP4", "sm_89", "sm_120, sm_121")],
)
def test_an_architecture_without_the_type_is_refused(
    make_pair: PairFactory, build_engines: BuildEngines, algorithm: Algorithm, arch: str, able: str
) -> None:
    pair = make_pair("qwen3", {"num_layers": 2}, TWO_TAPS, quantize=quantize(algorithm)).pair
    with pytest.raises(DflashError, match=f"quantised in {algorithm}, which {arch} .*{able} can"):
        build_engines(pair, BF16, arch)


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
            r" of workspace exceed the largest sm_120 device",
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

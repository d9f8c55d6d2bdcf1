"""Engines of quantised pairs: every quantised linear is an FP8 or FP4 product, and weighs so."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dflash_trt.bundle.memory.estimate import estimate_memory
from dflash_trt.cli.inspect import describe_bundle
from dflash_trt.errors import DflashError
from dflash_trt.graph.form import Precision
from dflash_trt.models.pair_check import Pair
from dflash_trt.models.quantized_weights import quantized_linears
from tests.backends.tensorrt.build.conftest import BuildEngines
from tests.pairs import TWO_KINDS, PairFactory
from tests.reference.quantized import Algorithm

TWO_TAPS = {"target_layer_ids": [0, 1]}
EVERYTHING = {"exclude": ["model.embed_tokens"]}
DRAFT = {"form": "nested", "exclude": ["lm_head", "model*"]}
QWEN3_64: dict[str, Any] = {
    "family": "qwen3",
    "target": {"num_layers": 2, "head_dim": 64, "heads": 4, "kv_heads": 1, "dtype": "bfloat16"},
    "draft": {"dtype": "bfloat16", **TWO_KINDS, **TWO_TAPS},
}
LLAMA_128: dict[str, Any] = {
    "family": "llama",
    "target": {"num_layers": 2, "head_dim": 128, "heads": 2, "kv_heads": 2, "attention_bias": True},
    "draft": {"heads": 2, "kv_heads": 1, **TWO_KINDS, **TWO_TAPS},
}
Case = tuple[dict[str, Any], Algorithm, Precision, str]
CASES: dict[str, Case] = {
    "nvfp4-64-bf16": (QWEN3_64, "NVFP4", Precision.BFLOAT16, "sm_120"),
    "fp8-128-fp16": (LLAMA_128, "FP8", Precision.FLOAT16, "sm_89"),
    "nvfp4-128-fp16": (LLAMA_128, "NVFP4", Precision.FLOAT16, "sm_121"),
}


def quantize(algorithm: Algorithm) -> dict[str, Any]:
    return {
        "target": {"algorithm": algorithm, "kv_cache": True, **EVERYTHING},
        "draft": {"algorithm": algorithm, **DRAFT},
    }


def expected_products(pair: Pair) -> dict[str, int]:
    """The linears that each graph computes: the target's inject, both read the output head."""
    own, drafts = quantized_linears(pair.target.weights), quantized_linears(pair.draft.weights)
    injected = [role for role in drafts if role.endswith(("fc", "k_proj", "v_proj"))]
    return {
        "target": len(own) + len(injected),
        "draft": len(drafts) - ("fc" in drafts) + ("lm_head" in own),
        "target_only": len(own),
    }


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CASES)
def test_every_quantised_linear_becomes_a_quantised_product(
    make_pair: PairFactory, build_engines: BuildEngines, name: str
) -> None:
    arguments, algorithm, precision, arch = CASES[name]
    pair = make_pair(**arguments, quantize=quantize(algorithm)).pair
    bundle = build_engines(pair, precision, arch)
    manifest = bundle.manifest
    expected = expected_products(pair)
    for engine in manifest.engines.files:
        assert engine.quantized_products == {algorithm: expected[engine.graph]}
        assert engine.fused_attentions == 2
        summary = json.loads((bundle.folder / engine.summary).read_text())
        assert set(summary["quantized_products"].values()) == {algorithm}
        kind = "DYNAMIC_QUANTIZE" if algorithm == "NVFP4" else "QUANTIZE"
        assert summary["layers"][kind] == expected[engine.graph]
    quantization = manifest.target.quantization
    assert quantization is not None
    assert quantization.linears == {algorithm: 15}
    assert (quantization.kv_cache, quantization.kv_scales) == ("FP8", 4)
    assert {"NVFP4": "U8", "FP8": "F8_E4M3"}[algorithm] in manifest.target.storage_dtypes
    plain = make_pair(**arguments).bundle.manifest
    assert manifest.target.parameters == plain.target.parameters
    assert manifest.draft.parameters == plain.draft.parameters
    shown = "\n".join(describe_bundle(manifest, estimate_memory(manifest, 1, 1)))
    assert f"15 linears in {algorithm}; excluded model.embed_tokens; FP8 KV cache not" in shown
    assert f"{expected['target']} {algorithm} products" in shown


@pytest.mark.parametrize(
    ("algorithm", "arch", "able"),
    [
        ("FP8", "sm_86", "sm_120, sm_121, sm_89"),
        ("NVFP4", "sm_86", "sm_120, sm_121"),
        ("NVFP4", "sm_89", "sm_120, sm_121"),
    ],
)
def test_an_architecture_without_the_type_is_refused(
    make_pair: PairFactory, build_engines: BuildEngines, algorithm: Algorithm, arch: str, able: str
) -> None:
    pair = make_pair(**QWEN3_64, quantize=quantize(algorithm)).pair
    with pytest.raises(DflashError, match=f"quantised in {algorithm}, which {arch} .*{able} can"):
        build_engines(pair, Precision.BFLOAT16, arch)

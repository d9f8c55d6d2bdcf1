"""Quantised linears of hybrids, Gemma 4 and mixtures of experts, against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dflash_trt.backends.base import Scores, TargetCall
from dflash_trt.quantization.linears import ALL_EXPERTS
from tests.covering import exhaustive
from tests.pairs import PairFactory
from tests.reference.compare import max_relative_error
from tests.reference.quantized import load_quantized_target, quantized_modules

ROWS, SEEDS, VOCAB = 4, 200, 96
BOUND = 1e-5
"""No value is rounded to another code, so what is left is the order of sums."""
HYBRID: dict[str, Any] = {"vocab": VOCAB, "num_layers": 4, "head_dim": 32}
GEMMA: dict[str, Any] = {"vocab": VOCAB, "num_layers": 3, "tie": True}
ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
MLP = {"gate_proj", "up_proj", "down_proj"}
RECURRENT = {"in_proj_qkv", "in_proj_z", "out_proj"}
TARGETS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "qwen3_5": (HYBRID, ATTENTION | MLP | RECURRENT),
    "qwen3_5_moe": (HYBRID | {"experts": 4}, ATTENTION | MLP | RECURRENT),
    "gemma4": (GEMMA, ATTENTION | MLP),
    "gemma4_moe": (GEMMA, ATTENTION | MLP),
}


@pytest.mark.parametrize(
    ("family", "algorithm"),
    [
        ("qwen3_5", "NVFP4"),
        ("gemma4_moe", "FP8"),
        exhaustive("qwen3_5", "FP8"),
        exhaustive("qwen3_5_moe", "NVFP4"),
        exhaustive("qwen3_5_moe", "FP8"),
        exhaustive("gemma4", "NVFP4"),
        exhaustive("gemma4", "FP8"),
        exhaustive("gemma4_moe", "NVFP4"),
    ],
)
def test_quantised_linears_equal_an_independent_evaluation(
    make_pair: PairFactory, family: Any, algorithm: str, tmp_path: Path
) -> None:
    """Row by row in transformers, over rows that no linear rounds near a midpoint of two codes.

    Attention, recurrent projections, MLPs and the expert that all rows share are quantised; gates,
    routers and experts that rows choose are not.
    """
    target, expected = TARGETS[family]
    exclude = ["lm_head", "mtp*", ALL_EXPERTS]
    quantize = {"target": {"algorithm": algorithm, "exclude": exclude}}
    built = make_pair(family, target, {"target_layer_ids": [0, 2]}, quantize=quantize)
    modules = quantized_modules(built.folder / "target")
    assert {name.rpartition(".")[2] for name in modules} == expected
    assert not any(".experts." in name for name in modules)
    model = load_quantized_target(built.folder / "target", tmp_path / "plain", modules)
    for seed in range(SEEDS):
        ids = np.random.default_rng(seed).integers(0, VOCAB, (1, ROWS))
        cache, want = None, []
        for row in range(ROWS):
            given = torch.tensor(ids[:, row : row + 1])
            with torch.no_grad():
                output = model(given, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            want.append(output.logits)
        if not sum(linear.take_doubts() for linear in modules.values()):
            break
    else:
        pytest.fail("rows of every seed are rounded near a midpoint")
    picked = np.arange(ROWS)[None]
    call = TargetCall("target", 0, ids, np.zeros(1, np.int64), picked, Scores.LOGITS)
    logits = built.open().forward(call).logits
    assert logits is not None
    assert max_relative_error(logits, torch.cat(want, dim=1)) <= BOUND

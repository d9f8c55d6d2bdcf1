"""Mixtures of experts and attention sinks: what each form computes, touches and refers to."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from dflash_trt.building.spec import BuildSpec
from tests.graph.runner import GraphRunner
from tests.pairs import bundle_pair
from tests.reference.checkpoints import write_draft, write_target


def test_experts_that_no_row_chose_are_not_touched(tmp_path: Path) -> None:
    """Their weights are NaN, which any product would spread."""
    target = write_target(tmp_path / "target", "gpt_oss", num_layers=4, chosen=2)
    tensors = load_file(target / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("router.bias"):
            tensor[[1, 6]] += 1e4
        if ".experts." in name:
            tensor[[0, 2, 3, 4, 5, 7]] = torch.nan
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    write_draft(tmp_path / "draft", target, target_layer_ids=[1, 2])
    built = bundle_pair(tmp_path, BuildSpec())
    ids = np.random.default_rng(0).integers(0, 200, (2, 20))
    assert np.isfinite(GraphRunner(built, batch=2).target(ids, [0, 0])["logits"]).all()


def test_experts_of_several_types_are_one_mixture(tmp_path: Path) -> None:
    """Pieces of two types are decoded before they are put together."""
    logits = []
    for name, kind in (("one", torch.float32), ("two", torch.bfloat16)):
        folder = tmp_path / name
        target = write_target(folder / "target", "qwen3_moe", dtype="bfloat16", num_layers=4)
        tensors = load_file(target / "model.safetensors")
        for key in [key for key in tensors if ".experts.3." in key]:
            tensors[key] = tensors[key].to(kind)
        save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
        write_draft(folder / "draft", target, target_layer_ids=[1, 2])
        ids = np.random.default_rng(0).integers(0, 200, (1, 20))
        built = bundle_pair(folder, BuildSpec())
        logits.append(GraphRunner(built).target(ids, [0])["logits"])
    np.testing.assert_array_equal(*logits)

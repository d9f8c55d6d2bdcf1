"""What a Gemma's config says beyond any other's: two RoPEs, and scales of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_trt.models.config_fields import ConfigFields
from dflash_trt.models.rope import RopeSpec, YarnScaling, read_ropes_by_kind
from dflash_trt.models.target import read_target
from dflash_trt.training.target import load_ends
from tests.models.helpers import refused
from tests.reference.checkpoints import write_target
from tests.reference.compare import max_relative_error
from tests.reference.generate import load_target

YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}


def ropes(**config: Any) -> tuple[RopeSpec, RopeSpec]:
    return read_ropes_by_kind(ConfigFields(config, Path("config.json")))


@pytest.mark.parametrize(
    ("config", "thetas"),
    [
        ({}, (1e6, 1e4)),
        ({"rope_theta": 5e5, "rope_local_base_freq": 2e4, "rope_scaling": None}, (5e5, 2e4)),
        ({"rope_parameters": {"full_attention": {"rope_theta": 3e5}}}, (3e5, 1e4)),
        ({"rope_parameters": {"sliding_attention": {"rope_theta": 3e4}}}, (1e6, 3e4)),
    ],
)
def test_each_kind_of_layer_has_its_rope(
    config: dict[str, Any], thetas: tuple[float, float]
) -> None:
    assert ropes(**config) == (RopeSpec(thetas[0]), RopeSpec(thetas[1]))


def test_only_layers_that_see_everything_are_stretched() -> None:
    full, sliding = ropes(rope_scaling=YARN, max_position_embeddings=512)
    assert isinstance(full.scaling, YarnScaling) and sliding == RopeSpec(1e4)
    with refused('rope_type = "linear" is not supported'):
        ropes(rope_scaling={"rope_type": "linear", "factor": 8.0})


def test_scales_are_those_of_the_published_weights(tmp_path: Path) -> None:
    """Of √48 = 6.928 bfloat16 keeps 6.9375: what a bfloat16 checkpoint was trained with."""
    folder = write_target(tmp_path / "narrow", "gemma3", "bfloat16", hidden=48, num_layers=3)
    target = read_target(folder)
    assert target.embedding_scale == 6.9375
    assert (target.norm_offset, target.query_scale) == (1.0, 21**-0.5)
    assert target.local_rope == RopeSpec(100.0) and target.rope == RopeSpec(10_000.0)
    assert target.layer_windows == (24, 24, None)


def test_a_draft_in_training_borrows_what_the_target_computes_with(tmp_path: Path) -> None:
    folder = write_target(tmp_path / "wide", "gemma3", hidden=48, num_layers=3, tie=True)
    ends, model = load_ends(read_target(folder)), load_target(folder)
    every = model.get_input_embeddings()(torch.arange(256))
    assert max_relative_error(ends.embedding, every) < 1e-6  # a product of two float32
    stream = torch.randn(5, 48, generator=torch.Generator().manual_seed(3))
    assert max_relative_error(ends.states(stream), model.model.norm(stream)) < 1e-6
    assert torch.equal(ends.head, model.get_output_embeddings().weight)

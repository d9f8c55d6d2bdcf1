"""Gemma 3 and Gemma 4: two RoPEs, heads of two kinds, scales of their own; what is refused."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import Gemma3TextConfig, Gemma4TextConfig

from dflash_trt.deploy.planning.read_shapes import read_target_shape
from dflash_trt.models.config_fields import ConfigFields
from dflash_trt.models.draft import read_draft
from dflash_trt.models.families import GEMMA3_SILENT
from dflash_trt.models.pair_check import check_pair
from dflash_trt.models.rope import Proportional, RopeSpec, read_ropes_by_kind
from dflash_trt.models.sizes import ExpertSizes
from dflash_trt.models.target import read_target
from dflash_trt.training.target import load_ends
from tests.models.helpers import edit_json, refused, text_config_changer
from tests.reference.checkpoints import write_draft, write_target
from tests.reference.compare import max_relative_error
from tests.reference.generate import load_target


def ropes(**config: Any) -> tuple[RopeSpec, RopeSpec]:
    return read_ropes_by_kind(ConfigFields(config, Path("config.json")))


LINEAR: dict[str, Any] = {"rope_type": "linear", "factor": 8.0}
STRETCHED = RopeSpec(5e5, Proportional(1.0, 8.0))
OLDER: dict[str, Any] = {"rope_theta": 5e5, "rope_local_base_freq": 2e4}
BY_KIND: dict[str, Any] = {"rope_parameters": {"full_attention": {"rope_theta": 5e5}}}


@pytest.mark.parametrize(
    ("config", "full", "sliding"),
    [
        ({}, RopeSpec(1e6), 1e4),
        (OLDER | {"rope_scaling": None}, RopeSpec(5e5), 2e4),
        (OLDER | {"rope_scaling": LINEAR}, STRETCHED, 2e4),
        (OLDER | {"rope_parameters": {"sliding_attention": {}}}, RopeSpec(5e5), 2e4),
        (BY_KIND, RopeSpec(5e5), 1e4),
        (BY_KIND | {"rope_scaling": LINEAR}, STRETCHED, 1e4),
        ({"rope_parameters": {"full_attention": {"rope_theta": 5e5, **LINEAR}}}, STRETCHED, 1e4),
        ({"rope_parameters": {"sliding_attention": {"rope_theta": 3e4}}}, RopeSpec(1e6), 3e4),
    ],
)
def test_each_kind_of_layer_has_its_rope(
    config: dict[str, Any], full: RopeSpec, sliding: float
) -> None:
    """Those that slide are not stretched where `rope_scaling` is, as in transformers."""
    assert ropes(**config) == (full, RopeSpec(sliding))
    theirs: Any = Gemma3TextConfig(**copy.deepcopy(config)).rope_parameters
    thetas = [theirs[kind]["rope_theta"] for kind in ("full_attention", "sliding_attention")]
    assert thetas == [full.theta, sliding]


def test_a_config_says_as_little_as_that_of_the_4b(tmp_path: Path) -> None:
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    text |= {"rope_scaling": LINEAR, "sliding_window": 1024}
    whole = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    shape, theirs = read_target_shape(tmp_path), Gemma3TextConfig()
    slides = shape.sizes.layer
    assert (slides.heads, slides.kv_heads, slides.head_dim) == (8, 4, 256)
    assert shape.sizes.windows == ((1024,) * 5 + (None,)) * 5 + (1024,) * 4
    assert shape.vocab_size == 262208 and shape.tie_word_embeddings
    assert {key: getattr(theirs, key) for key in GEMMA3_SILENT} == GEMMA3_SILENT


@pytest.mark.parametrize("family", ["gemma3", "qwen3_5"])
def test_names_that_transformers_saves_it_under_again(tmp_path: Path, family: Any) -> None:
    """A Gemma 3 under its newer names; of a Qwen3.5 the text model, under those of the whole."""
    folder = write_target(tmp_path / "published", family, vision=True, head_dim=32, num_layers=4)
    load_target(folder).save_pretrained(tmp_path / "again", save_original_format=family != "gemma3")
    first, again = read_target(folder), read_target(tmp_path / "again")
    assert (first.sizes, first.rope) == (again.sizes, again.rope)
    mine, theirs = (load_file(one.checkpoint.path / "model.safetensors") for one in (first, again))
    assert first.weights.keys() == again.weights.keys() and "lm_head" in first.weights
    for role, entry in first.weights.items():
        assert torch.equal(mine[entry.name].float(), theirs[again.weights[role].name].float())
    assert again.weights["norm"].name == "model.language_model.norm.weight"


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


FULL = {"head_dim": 32, "num_key_value_heads": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("gemma4") / "target"
    return write_target(made, "gemma4", "bfloat16", tie=True, hidden=48)


@pytest.fixture
def config(folder: Path) -> Iterator[Any]:
    yield from text_config_changer(folder)


def test_both_kinds_of_heads_are_read_and_the_tower_let_be(folder: Path) -> None:
    target = read_target(folder)
    slides, full = target.sizes.layer, target.sizes.full_layer
    assert target.layer_windows == (24, 24, None) * 2
    assert (slides.kv_heads, slides.head_dim, slides.keys_are_values) == (2, 16, False)
    assert (full.kv_heads, full.head_dim, full.keys_are_values) == (1, 32, True)
    assert target.sizes.layers[1].norms_values and target.sizes.layers[2].norms_values
    assert target.weights["layers.1.v_proj"].shape == (32, 48)
    assert "layers.2.v_proj" not in target.weights
    assert (target.norm_offset, target.query_scale, target.logit_cap) == (0.0, 1.0, 12.0)
    assert target.embedding_scale == 6.9375  # what bfloat16 keeps of √48
    assert target.rope == RopeSpec(10_000.0, Proportional(0.25))
    assert target.local_rope == RopeSpec(100.0)
    unused = [name for name in target.checkpoint.tensors if "vision" in name]
    assert len(unused) > 5
    assert not {entry.name for entry in target.weights.values()} & set(unused)
    assert read_target_shape(folder).sizes == target.sizes


def test_silent_configs_mean_what_transformers_makes_of_them(folder: Path, config: Any) -> None:
    config(rope_parameters=None, layer_types=None, final_logit_softcapping=None)
    with refused("wrong shape"):  # of six layers the last alone is full
        read_target(folder)
    config(rope_parameters=None, final_logit_softcapping=None)
    target = read_target(folder)
    assert target.rope == RopeSpec(1e6, Proportional(0.25)) and target.logit_cap is None
    assert target.local_rope == RopeSpec(1e4)


@pytest.mark.parametrize("stated", [{}, None, {"0": {}, "5": {"head_dim": 16}}])
def test_layers_that_are_all_alike(tmp_path: Path, stated: Any) -> None:
    """Then the keys of published configs mean nothing: transformers 5 reads its own alone."""
    folder = write_target(tmp_path / "target", "gemma4", alone=True, keys_are_values=False)
    config = json.loads((folder / "config.json").read_text())
    config |= {"per_layer_config": stated, "global_head_dim": 32}
    (folder / "config.json").write_text(json.dumps(config))
    theirs: Any = Gemma4TextConfig(**config).per_layer_config["full_attention"]
    full = read_target_shape(folder).sizes.full_layer
    assert full.norms_values
    assert (full.kv_heads, full.head_dim) == (theirs.num_key_value_heads, theirs.head_dim)


def test_heads_as_transformers_writes_them(folder: Path, config: Any) -> None:
    want, silent = read_target(folder).sizes, {"global_head_dim": None}
    config(per_layer_config={"2": FULL, "5": FULL}, num_global_key_value_heads=None, **silent)
    assert read_target(folder).sizes == want
    for stated in ({"5": FULL}, {"2": FULL, "5": FULL | {"head_dim": 64}}):
        config(per_layer_config=stated, **silent)
        with refused("per_layer_config", "must be alike, and no others"):
            read_target(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size_per_layer_input": 256}, "Gemma 4 E2B and E4B"),
        ({"use_bidirectional_attention": "all"}, "texts must be causal"),
        ({"layer_types": ["sliding_attention"] * 6}, "must end with full_attention"),
        ({"num_global_key_value_heads": 3}, "must divide num_attention_heads (4)"),
        ({"rope_scaling": LINEAR, "rope_parameters": None}, "this RoPE is proportional"),
        ({"attn_logit_softcapping": 50.0}, "as it is known here has none"),
        ({"hidden_activation": "gelu"}, "only gelu_pytorch_tanh is"),
    ],
    ids=str,
)
def test_configs_that_say_otherwise(
    folder: Path, config: Any, changes: dict[str, Any], message: str
) -> None:
    config(**changes)
    with refused(next(iter(changes)), message):
        read_target(folder)


def test_a_draft_caps_logits_as_its_target_does(folder: Path, tmp_path: Path) -> None:
    target = read_target(folder)
    draft = write_draft(tmp_path / "draft", folder)
    for stated in (None, 12.0, 0, -1.0):  # z-lab's drafts have none where it is not above 0
        edit_json(draft / "config.json", final_logit_softcapping=stated)
        check_pair(target, read_draft(draft))
    edit_json(draft / "config.json", final_logit_softcapping=30.0)
    with refused("final_logit_softcapping 30 is not the target's, which has 12"):
        check_pair(target, read_draft(draft))


def test_experts_beside_the_mlp(tmp_path: Path) -> None:
    folder = write_target(tmp_path / "target", "gemma4_moe", intermediate=40, shared=72)
    target = read_target(folder)
    assert target.moe is not None
    sizes = (target.moe.experts, target.moe.chosen, target.moe.intermediate_size)
    assert sizes == (8, 3, 40) and target.moe.shared == 72 and target.moe.is_normalized
    assert target.weights["layers.0.experts.gate_up.rows"].shape == (8, 80, 64)
    assert target.weights["layers.5.down_proj"].shape == (64, 72)
    assert target.weights["layers.5.expert_scales"].shape == (8,)
    assert read_target_shape(folder).sizes.experts == ExpertSizes(8, 3, 40, shared=72)
    text = json.loads((folder / "config.json").read_text())["text_config"]
    edit_json(folder / "config.json", text_config=text | {"top_k_experts": 9})
    with refused("top_k_experts", "from 1 to 8"):
        read_target(folder)

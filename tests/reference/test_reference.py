"""The reference checked against itself, against other formulations, and against ModelOpt."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.covering import exhaustive

from .checkpoints import write_draft, write_target
from .compare import assert_bitwise_equal, max_relative_error, stack_error
from .draft import ReferenceDraft
from .generate import (
    dflash_greedy,
    fit_draft,
    forward_with_taps,
    greedy,
    hidden_taps,
    load_target,
)

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
SLIDING: list[Any] = ["sliding_attention", "full_attention"]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ReferenceDraft]:
    """A fitted pair: drafts are accepted in runs of several lengths."""
    folder = tmp_path_factory.mktemp("pair")
    target = load_target(write_target(folder / "target", vocab=64))
    write_draft(folder / "draft", folder / "target", layer_types=SLIDING, sliding_window=24)
    fit_draft(folder / "draft", target, [PROMPT, PROMPT[::-1]])
    return target, ReferenceDraft.load(folder / "draft", target)


def load_pair(folder: Path, **draft: Any) -> tuple[Any, ReferenceDraft]:
    """A random pair of default sizes; `draft` goes to write_draft."""
    target = load_target(write_target(folder / "target"))
    written = write_draft(folder / "draft", folder / "target", **draft)
    return target, ReferenceDraft.load(written, target)


@pytest.mark.parametrize("style", ["rope_theta", "rope_parameters"])
def test_llama3_frequencies_equal_those_of_transformers(tmp_path: Path, style: Any) -> None:
    scaled = {"rope": "llama3", "rope_theta": 5e5}
    target = load_target(write_target(tmp_path / "t", "llama", **scaled))
    folder = write_draft(tmp_path / "d", tmp_path / "t", **scaled, rope_style=style)
    expected = target.model.rotary_emb.inv_freq
    error = max_relative_error(ReferenceDraft.load(folder, target).inv_freq, expected)
    assert error < 1e-6  # 16 roundings


def test_taps_are_hidden_states(tmp_path: Path) -> None:
    target = load_target(write_target(tmp_path, num_layers=4))
    ids = torch.tensor([PROMPT, PROMPT[::-1]])
    taps = hidden_taps(target, ids, (0, 2, 2, 3)).chunk(4, dim=-1)
    states = target(ids, output_hidden_states=True).hidden_states
    for tap, layer in zip(taps, (0, 2, 2, 3), strict=True):
        assert_bitwise_equal(tap, states[layer + 1], f"tap {layer}")
    _, plain = forward_with_taps(target, ids, (3,), norms_last=False)
    assert max_relative_error(plain, states[4]) > 0.1
    assert_bitwise_equal(target.model.norm(plain), states[4], "normed tap 3")


@pytest.mark.parametrize("block_size", [exhaustive(2), exhaustive(3), exhaustive(5), 8])
def test_dflash_emits_the_greedy_tokens(pair: tuple[Any, ReferenceDraft], block_size: int) -> None:
    target, draft = pair
    runs = set[int]()
    for prompt in (PROMPT, [7], PROMPT * 4):
        plain = greedy(target, prompt, 80)
        drafted = dflash_greedy(target, draft, prompt, 80, block_size)
        assert drafted.tokens == plain.tokens, f"near tie: {plain.smallest_gap}"
        assert max_relative_error(drafted.logits, plain.logits) < stack_error(6)
        assert 1 + sum(a + 1 for a in drafted.accepted) >= 80
        assert all(len(s.block) == block_size for s in drafted.steps)
        runs |= set(drafted.accepted)
    assert len(runs) >= min(3, block_size), "drafts are accepted in runs of several lengths"


@pytest.mark.parametrize("window", [None, 9])
def test_block_equals_modelopts_module(tmp_path: Path, window: int | None) -> None:
    """ModelOpt's DFlashModule with our weights."""
    modeling = pytest.importorskip("modelopt.torch.speculative.plugins.modeling_dflash")
    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    sliding = {"layer_types": ["sliding_attention"] * 3, "sliding_window": window}
    target, draft = load_pair(tmp_path, num_layers=3, **sliding)
    config = Qwen3Config.from_pretrained(tmp_path / "draft")
    config.target_layer_ids = draft.config.target_layer_ids
    config._attn_implementation = "sdpa"
    module = modeling.DFlashModule(config)
    module.load_state_dict(draft.weights, strict=True)
    # Its own lazy construction of RoPE fails on transformers 5.23.
    module.rotary_emb = Qwen3RotaryEmbedding(config=module._rotary_config)
    features = hidden_taps(target, torch.tensor([PROMPT * 3]), draft.config.target_layer_ids)
    output = draft.draft(torch.tensor([11]), 24, draft.project(features))
    block = torch.tensor([[11] + [draft.config.mask_token_id] * 7])
    mask = None
    if window is not None:  # which SDPA does not have
        distance = (torch.arange(24, 32)[:, None] - torch.arange(32)[None]).abs()
        mask = torch.zeros(1, 1, 8, 32).masked_fill(distance >= window, -torch.inf)
    with torch.no_grad():
        expected = module.eval()(draft.embed[block], features, torch.arange(32)[None], mask)
    assert max_relative_error(output.final_hidden, expected) < stack_error(3)

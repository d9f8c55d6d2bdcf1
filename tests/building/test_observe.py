"""Observed ranges against hooks on independent models, and against themselves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from torch import Tensor

from dflash_trt.building.observing import observe as observing
from dflash_trt.building.observing.observe import PairAmax, observe, place_anchors
from dflash_trt.errors import DflashError
from dflash_trt.models.draft import read_draft
from dflash_trt.models.pair_check import Pair, check_pair
from dflash_trt.models.target import read_target
from tests.pairs import PairFactory, SilentProgress, TinyPair
from tests.quantization.running import Stages
from tests.reference.checkpoints import write_draft, write_target
from tests.reference.compare import stack_error
from tests.reference.draft import ReferenceDraft
from tests.reference.generate import forward_with_taps, load_target

BOUND = stack_error(9)
LENGTHS = (75, 1, 2, 30)
VARIANTS: dict[str, tuple[Any, ...]] = {
    "qwen3": ("qwen3", {"kv_heads": 4}, {"num_layers": 3}),
    "llama_tied": (
        "llama",
        {"dtype": "bfloat16", "tie": True, "attention_bias": True, "rope": "llama3"},
        {"dtype": "float16", "heads": 2, "kv_heads": 1, "head_dim": 32, "intermediate": 40},
    ),
    "one_tap": ("qwen3", {"shards": 3}, {"num_layers": 1, "target_layer_ids": [4]}),
    "hybrid": ("qwen3_5", {"num_layers": 4, "head_dim": 32}, {"target_layer_ids": [0, 3]}),
}
HYBRID_BOUND = 1e-3
"""transformers runs rows of recurrent layers 64 at once, which rounds otherwise."""


def sequences(vocab: int = 256, lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    generator = np.random.default_rng(3)
    return [generator.integers(0, vocab, length).tolist() for length in lengths]


class Hooks:
    """Notes max |input| of every linear module of a transformers model, by our role."""

    def __init__(self, model: Any) -> None:
        self.amax: dict[str, float] = {}
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear):
                module.register_forward_pre_hook(self._note(role_of(name, model)))

    def _note(self, role: str) -> Any:
        def note(_module: Any, arguments: tuple[Tensor, ...]) -> None:
            self.amax[role] = max(float(arguments[0].abs().max()), self.amax.get(role, 0.0))

        return note


def role_of(name: str, model: Any) -> str:
    """`model.layers.0.self_attn.q_proj` is layers.0.q_proj here."""
    if name == "lm_head":
        return "embed_tokens" if model.config.tie_word_embeddings else name
    for part in (".self_attn", ".linear_attn", ".mlp"):
        name = name.replace(part, "")
    return name.removeprefix("model.")


class WatchedDraft(ReferenceDraft):
    """The reference drafter, noting max |input| of its linears and what it gives the head."""

    amax: dict[str, float]
    head: float

    @classmethod
    def watch(cls, folder: Path, target: Any) -> WatchedDraft:
        draft = cls.load(folder, target)
        assert isinstance(draft, WatchedDraft)
        draft.amax, draft.head = {}, 0.0
        return draft

    def _linear(self, x: Tensor, name: str) -> Tensor:
        role = name.replace(".self_attn", "").replace(".mlp", "")
        self.amax[role] = max(float(x.abs().max()), self.amax.get(role, 0.0))
        return super()._linear(x, name)

    def run(self, target: Any, sequence: list[int], anchors: list[int]) -> None:
        ids = torch.tensor([sequence])
        projected = self.project(forward_with_taps(target, ids, self.config.target_layer_ids)[1])
        for anchor in anchors:
            context = [(k[:, :, :anchor], v[:, :, :anchor]) for k, v in projected]
            output = self.draft(ids[:, anchor], anchor, context)
            self.head = max(self.head, float(output.final_hidden[:, 1:].abs().max()))


def assert_close(
    actual: Mapping[str, float], expected: Mapping[str, float], bound: float = BOUND
) -> None:
    """Of the linears; caches have a test of their own."""
    assert {role for role in actual if not role.endswith("_cache")} == expected.keys()
    for role, value in expected.items():
        assert math.isclose(actual[role], value, rel_tol=bound), role


@pytest.mark.parametrize("name", VARIANTS)
def test_every_linear_of_both_models_equals_hooks(make_pair: PairFactory, name: str) -> None:
    built = make_pair(*VARIANTS[name])
    bound = HYBRID_BOUND if built.pair.target.sizes.has_state else BOUND
    texts = sequences()
    target = load_target(built.folder / "target")  # of its own: hooks stay
    hooks = Hooks(target)
    with torch.no_grad():
        for text in texts:
            target(torch.tensor([text]))
    expected = dict(hooks.amax)
    alone = observe(built.pair.target, None, texts, SilentProgress())["target"]
    assert_close(alone, expected, bound)

    draft = WatchedDraft.watch(built.folder / "draft", target)
    for text in texts:
        draft.run(target, text, anchors_of(built, text))
    head = "embed_tokens" if built.pair.target.tie_word_embeddings else "lm_head"
    expected[head] = max(expected[head], draft.head)
    amax = observe_pair(built.pair, texts)
    assert_close(amax["target"], expected, bound)
    assert_close(amax["draft"], draft.amax, bound)
    # K and V read the features too, Q does not.
    assert amax["draft"]["layers.0.k_proj"] == amax["draft"]["layers.0.v_proj"]
    assert amax["draft"]["layers.0.k_proj"] >= amax["draft"]["layers.0.q_proj"]
    assert amax["draft"]["layers.0.gate_proj"] == amax["draft"]["layers.0.up_proj"]


def anchors_of(built: TinyPair, text: list[int]) -> list[int]:
    return place_anchors(len(text), built.pair.draft.block_size, 2048)


def observe_pair(pair: Pair, texts: list[list[int]], **options: Any) -> PairAmax:
    return observe(pair.target, pair.draft, texts, SilentProgress(), **options)


def test_neither_repetition_nor_chunking_matters(
    make_pair: PairFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit: rows do not depend on the rows beside them."""
    pair = make_pair().pair
    texts = sequences(lengths=(140, 33))
    reference = observe_pair(pair, texts)
    assert observe_pair(pair, texts[::-1]) == reference
    monkeypatch.setattr(observing, "PREFILL_CHUNK", 7)
    again = observe_pair(pair, texts)
    assert again == reference and list(again["target"]) == list(reference["target"])
    alone = observe(pair.target, None, texts, SilentProgress())["target"]
    assert {**reference["target"], "lm_head": alone["lm_head"]} == alone
    assert all(np.float32(value) == value for value in alone.values())


@pytest.mark.parametrize("length", [0, 1, 2, 9, 10, 100, 5000])
def test_anchors_have_context_before_them_and_room_behind(length: int) -> None:
    anchors = place_anchors(length, 8, 2048, 16)
    assert len(anchors) <= 16
    assert bool(anchors) == (length >= 2)
    assert anchors == sorted(anchors)
    assert all(1 <= anchor < length and anchor + 8 <= 2048 for anchor in anchors)
    gaps = np.diff(anchors)
    assert (gaps >= 8).all() and (not len(gaps) or max(gaps) - min(gaps) <= 1)


def test_progress_counts_tokens_and_nothing_is_left(make_pair: PairFactory, tmp_path: Path) -> None:
    built = make_pair()
    texts, stages = sequences(), Stages()
    observe(built.pair.target, built.pair.draft, texts, stages, workspace=tmp_path)
    blocks = sum(len(anchors_of(built, text)) for text in texts)
    total = sum(LENGTHS) + blocks * built.pair.draft.block_size
    assert blocks >= 10
    assert list(stages.totals.items())[-1] == ("observing activations", total)
    assert stages.done["observing activations"] == total
    assert stages.units["observing activations"] == "tokens"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("texts", "pieces"),
    [
        ([], ["calibration", "no calibration sequence"]),
        ([[1, 2], []], ["calibration sequence 2", "no token"]),
        ([[1], [5, 256]], ["calibration sequence 2", "token id 256", "vocabulary of 256"]),
        ([[-1]], ["calibration sequence 1", "token id -1"]),
    ],
)
def test_sequences_that_cannot_be_used(
    make_pair: PairFactory, tmp_path: Path, texts: list[list[int]], pieces: list[str]
) -> None:
    built = make_pair()
    with pytest.raises(DflashError) as caught:
        observe_pair(built.pair, texts, workspace=tmp_path)
    assert caught.value.usage
    assert all(piece in caught.value.message for piece in pieces), caught.value.message
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("part", "tensor", "linears"),
    [
        ("target", "model.layers.2.mlp.up_proj.weight", ["2.down_proj"]),
        ("target", "model.layers.5.input_layernorm.weight", ["5.k_proj", "5.q_proj"]),
        ("draft", "layers.1.self_attn.v_proj.weight", ["1.o_proj"]),
    ],
)
def test_activations_that_are_not_finite_name_the_linear(
    tmp_path: Path, part: str, tensor: str, linears: list[str]
) -> None:
    write_target(tmp_path / "target")
    write_draft(tmp_path / "draft", tmp_path / "target")
    path = tmp_path / part / "model.safetensors"
    tensors = load_file(path)
    tensors[tensor] = tensors[tensor].copy()
    tensors[tensor].flat[7] = np.nan
    save_file(tensors, path)
    pair = check_pair(read_target(tmp_path / "target"), read_draft(tmp_path / "draft"))
    with pytest.raises(DflashError, match="not finite") as caught:
        observe_pair(pair, sequences())
    for linear in linears:
        assert f"{part}/layers.{linear}" in caught.value.message


def test_too_little_memory_is_known_before_anything_is_loaded(
    make_pair: PairFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = make_pair()
    monkeypatch.setattr(observing, "available_memory", lambda: 9)
    with pytest.raises(DflashError, match=r"needs about 0\.0 GiB .* 0\.0 GiB are available"):
        observe_pair(built.pair, sequences(), workspace=tmp_path)
    assert not list(tmp_path.iterdir())

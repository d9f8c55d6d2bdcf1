"""The draft graph against the reference drafter, block by block and layer by layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dflash_trt.building.spec import BuildSpec
from dflash_trt.graph.bindings import DRAFT_TOKEN_IDS
from tests.covering import exhaustive
from tests.graph.runner import BOUND, GraphRunner, tokens
from tests.graph.variants import NAMES, build
from tests.pairs import PairFactory, TinyPair, bundle_pair
from tests.reference.compare import max_relative_error
from tests.reference.deepspec import DeepSpecDraft, write_deepspec, write_speculators
from tests.reference.draft import ReferenceDraft, load_tensors
from tests.reference.generate import forward_with_taps

CONTEXT = 90
# (0, …): nothing but the block. Ragged, and every window below is left behind by the later ones.
STARTS = [(0, 1), (7, 33), (64, 12), (82, 81)]
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]


class CausalSlidingDraft(ReferenceDraft):
    """The drafter with sliding layers that see no key after the query, key by key in float64."""

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, start: int, window: int | None
    ) -> Tensor:
        if window is None:
            return super()._attend(query, key, value, start, window)
        batch, heads, slots, size = query.shape
        group = self.config.heads // self.config.kv_heads
        q, k, v = query.double(), key.double(), value.double()
        attended = torch.zeros(batch, slots, heads, size, dtype=torch.float64)
        for b in range(batch):
            for h in range(heads):
                for row in range(slots):
                    p = start + row
                    seen = [j for j in range(key.shape[2]) if j <= p and p - j < window]
                    scores = k[b, h // group, seen] @ q[b, h, row] / math.sqrt(size)
                    attended[b, row, h] = torch.softmax(scores, -1) @ v[b, h // group, seen]
        return attended.flatten(2).to(query.dtype)


def check_blocks(
    built: TinyPair,
    reference: ReferenceDraft,
    starts: Sequence[tuple[int, int]],
    block_sizes: Sequence[int],
    scratch: int = 0,
) -> None:
    """Drafts at `starts` against `reference`: ids, and each layer's K and V of the block, which
    has `scratch` more rows than are verified."""
    vocab = built.pair.target.vocab_size
    ids = tokens(vocab, 2, CONTEXT, seed=5)
    anchors = ids[:, -1].tolist()
    runner = GraphRunner(built, batch=2)
    # Positions from `start` on hold features too: scratch that no block may see.
    runner.target(ids, [0, 0])
    _, taps = forward_with_taps(
        built.reference, torch.tensor(ids), reference.config.target_layer_ids
    )
    projected = reference.project(taps)
    unsure = compared = 0
    for block_size in block_sizes:
        for pair in starts:
            outputs = runner.draft(anchors, pair, block_size)
            for b, start in enumerate(pair):
                context = [(k[b : b + 1, :, :start], v[b : b + 1, :, :start]) for k, v in projected]
                block = reference.draft(
                    torch.tensor(anchors[b : b + 1]), start, context, block_size
                )
                got = outputs[DRAFT_TOKEN_IDS][b]
                assert got[0] == anchors[b]
                best = block.logits[0].topk(2, dim=-1).values
                clear = best[:, 0] - best[:, 1] > 2 * BOUND * block.logits.abs().max()
                clear[0] = True
                np.testing.assert_array_equal(got[clear], block.ids[0][clear])
                unsure, compared = unsure + int((~clear).sum()), compared + block_size
                for layer, kv in enumerate(block.block_kv):
                    for kind, expected in zip("kv", kv, strict=True):
                        cache = outputs[f"draft_{kind}_{layer}_out"][b]
                        rows = cache[:, start : start + block_size + scratch]
                        what = f"{kind} of layer {layer}, start {start}, block {block_size}"
                        assert max_relative_error(rows, expected[0]) <= BOUND, what
    assert unsure < 0.05 * compared, "too many ties to say that the drafts agree"


@pytest.mark.parametrize("name", NAMES)
def test_drafts_and_block_kv_equal_the_reference(make_pair: PairFactory, name: str) -> None:
    built = build(make_pair, name)
    check_blocks(built, built.reference_draft, STARTS, (2, 5, 8))


SLIDING = {"num_layers": 3, "layer_types": MIXED}
YARN = {"num_layers": 3, "rope": "yarn64", "rope_theta": 1e7, "head_dim": 32}


@pytest.mark.parametrize(
    ("window", "is_causal"),
    [(1, False), (16, False), (5, True), *(exhaustive(w, c) for w in (2, 200) for c in (0, 1))],
)
def test_layers_that_slide_see_the_window_and_nothing_past_it(
    make_pair: PairFactory, window: int, is_causal: bool
) -> None:
    """Both ways, or before them only."""
    draft = SLIDING | {"sliding_window": window}
    built = make_pair("qwen3", None, draft, dflash=None if is_causal else {"causal": False})
    assert built.pair.draft.layer_windows == (window, None, window)
    assert built.pair.draft.layer_causal == (bool(is_causal), False, bool(is_causal))
    reference = built.reference_draft
    if is_causal:
        reference = CausalSlidingDraft.load(built.folder / "draft", built.reference)
    check_blocks(built, reference, STARTS, (2, 3, 8))


def test_yarn_far_past_the_original_context(make_pair: PairFactory) -> None:
    """Full layers, YaRN from 32 positions (4096 where published) × 64; the target has none."""
    built = make_pair("qwen3", None, {**YARN, "target_layer_ids": [0, 1, 2, 4, 5]})
    check_blocks(built, built.reference_draft, STARTS, (2, 8))


@pytest.mark.parametrize(("family", "scale"), [("qwen3", 3.5), ("gemma3", 0.5)])
def test_a_stated_scale_is_of_the_stored_embedding(
    make_pair: PairFactory, family: Any, scale: float
) -> None:
    """As z-lab reads it; a draft that is silent takes a Gemma's embedding as the Gemma does."""
    built = make_pair(family, None, None, dflash={"input_embedding_scale": scale})
    reference = built.reference_draft
    stored = built.reference.get_input_embeddings().weight.detach()
    reference.embed = stored.to(reference.embed.dtype) * scale
    check_blocks(built, reference, STARTS, (2, 8))


STORED = {"float32": torch.float32, "bfloat16": torch.bfloat16}
RANK = 12


def rewritten(
    make_pair: PairFactory, folder: Path, rank: int, target: dict[str, Any], **draft: Any
) -> tuple[TinyPair, DeepSpecDraft]:
    """A pair whose draft is in DeepSpec's layout, and its reference."""
    base = make_pair("qwen3", target, draft)
    (folder / "target").symlink_to(base.folder / "target")
    stored = STORED[target.get("dtype", "float32")]
    vocab, markov = base.pair.target.vocab_size, None
    if rank:
        torch.manual_seed(3)
        first, second = torch.randn(vocab, rank), torch.randn(vocab, rank) * 0.4
        markov = first.to(stored), second.to(stored)
    write_deepspec(folder / "draft", base.folder / "draft", base.folder / "target", markov)
    wide: tuple[Tensor, Tensor] | None = None
    if markov is not None:
        wide = markov[0].float(), markov[1].float()
    return bundle_pair(folder, BuildSpec()), DeepSpecDraft(base.reference_draft, wide)


@pytest.mark.parametrize(
    ("rank", "target"),
    [
        (0, {"vocab": 192}),
        (RANK, {"vocab": 192}),
        (RANK, {"vocab": 192, "dtype": "bfloat16", "tie": True}),
    ],
    ids=["moved by a slot", "Markov head", "bfloat16, tied"],
)
def test_every_slot_drafts_what_the_reference_does(
    rank: int, target: dict[str, Any], make_pair: PairFactory, tmp_path: Path
) -> None:
    draft = {"target_layer_ids": [1, 3], "dtype": target.get("dtype", "float32")}
    pair, reference = rewritten(make_pair, tmp_path, rank, target, **draft)
    assert pair.bundle.manifest.draft.kind == ("DSpark" if rank else "DFlash")
    assert pair.bundle.manifest.draft.anchor_drafts
    check_blocks(pair, reference, [(0, 1), (7, 33), (82, 81)], (2, 5, 8), scratch=-1)


class SpeculatorsDraft(DeepSpecDraft, CausalSlidingDraft):
    """A drafter of speculators' whose sliding layers see only earlier rows of the block."""


SOME = sorted(np.random.default_rng(4).choice(192, 120, replace=False).tolist())
SPECULATORS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "32,000 of 151,936": ({"tokens": SOME}, ("lm_head",)),
    "all its own": ({"tokens": SOME, "own": 0.3}, ("embed_tokens", "lm_head")),
    "anchors draft": ({"sample_from_anchor": True, "own": None}, ()),
    "slides both ways": ({"sliding_window_non_causal": True}, ()),
    "DSpark": ({"kind": "dspark", "tokens": SOME}, ("lm_head",)),
    "DSpark behind its anchor": ({"kind": "dspark", "sample_from_anchor": False}, ()),
}
DAILY = {"32,000 of 151,936", "all its own", "DSpark", "DSpark behind its anchor"}


@pytest.mark.parametrize("name", [one if one in DAILY else exhaustive(one) for one in SPECULATORS])
def test_drafts_of_speculators(name: str, make_pair: PairFactory, tmp_path: Path) -> None:
    """Taps one layer on, fewer tokens, matrices of its own, anchors that draft, causal rows."""
    (options, owned), markov = SPECULATORS[name], None
    if "kind" in options:
        torch.manual_seed(3)
        count = len(options.get("tokens", range(192)))
        markov = torch.randn(192, RANK), torch.randn(count, RANK) * 0.4
    draft = SLIDING | {"sliding_window": 5, "target_layer_ids": [1, 3]}
    base = make_pair("qwen3", {"vocab": 192}, draft)
    (tmp_path / "target").symlink_to(base.folder / "target")
    folders = tmp_path / "draft", base.folder / "draft", base.folder / "target"
    write_speculators(*folders, markov=markov, **options)
    pair, is_causal = bundle_pair(tmp_path, BuildSpec()), name != "slides both ways"
    reference = (SpeculatorsDraft if is_causal else DeepSpecDraft)(base.reference_draft, markov)
    held = load_tensors(tmp_path / "draft")
    reference.embed = held.get("embed_tokens.weight", reference.embed)
    reference.lm_head = held.get("lm_head.weight", reference.lm_head)
    reference.tokens = torch.tensor(SOME) if "tokens" in options else None
    reference.drafts_anchor = options.get("sample_from_anchor", markov is not None)
    assert pair.pair.draft.owned == owned
    assert pair.pair.draft.layer_causal == (is_causal, False, is_causal)
    check_blocks(pair, reference, [(0, 1), (82, 81)], (2, 5, 8), -reference.drafts_anchor)

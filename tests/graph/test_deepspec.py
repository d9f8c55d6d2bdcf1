"""DeepSpec's drafts against an independent writing-down, slot by slot, and as they are replayed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_trt.building.spec import BuildSpec
from tests.graph.test_draft_numerics import check_blocks
from tests.pairs import PairFactory, TinyPair, bundle_pair
from tests.reference.deepspec import DeepSpecDraft, write_deepspec

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

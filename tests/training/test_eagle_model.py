"""The EAGLE-3 head that is trained is the head that is served."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from dflash_trt.checkpoints.draft import read_draft
from dflash_trt.training.eagle_model import EagleModel, new_head, save_eagle
from tests.reference.eagle import ReferenceEagle
from tests.training.test_draft_model import (
    HIDDEN,
    KINDS,
    VOCAB,
    embedding,
    ends,
)

HEAD = KINDS["EAGLE-3"]


def make_head() -> EagleModel:
    model = new_head(HEAD, seed=3)
    with torch.no_grad():
        for weight in model.parameters():  # as bfloat16 keeps them, norms too
            weight.add_(torch.randn_like(weight) * 0.1).copy_(weight.bfloat16().float())
    return model


def test_every_chain_is_what_the_published_head_computes(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model, table = make_head(), embedding()
    save_eagle(model, tmp_path, ends())
    tensors = load_file(tmp_path / "model.safetensors")
    weights = {name.removeprefix("midlayer."): one.float() for name, one in tensors.items()}
    reference = ReferenceEagle(weights, table, HEAD.config(), HEAD.target_layer_ids)
    tokens, features = torch.randint(0, VOCAB, (1, 12)), torch.randn(1, 12, 2 * HIDDEN)
    anchors = torch.tensor([[1, 4, 8]])
    before = torch.stack([tokens[0, at : at + HEAD.slots] for at in anchors[0]])[None]
    with torch.no_grad():
        states = model(features, anchors, table[before], table[tokens])
    for index, anchor in enumerate(anchors[0].tolist()):
        wanted = reference.taught(tokens[0, : anchor + HEAD.slots], features[0, :anchor], anchor)
        torch.testing.assert_close(states[0, index], wanted)


def test_what_is_saved_is_a_head_of_some_tokens(tmp_path: Path) -> None:
    model = make_head()
    save_eagle(model, tmp_path, ends(), torch.tensor([3, 5, 40]))
    spec = read_draft(tmp_path)
    assert (spec.kind, spec.token_ids) == ("EAGLE-3", (3, 5, 40))
    assert spec.target_layer_ids == HEAD.target_layer_ids
    held = load_file(tmp_path / "model.safetensors")
    assert held["lm_head.weight"].equal(ends().head[[3, 5, 40]].bfloat16())
    assert held["t2d"].nonzero().flatten().tolist() == [3, 5, 40]
    assert sum(one.numel() for one in model.parameters()) == HEAD.parameters

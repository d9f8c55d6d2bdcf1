"""The draft that is trained is the draft that is served, and its loss is the paper's."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from dflash_trt.models.dflash2 import Dflash2Sizes
from dflash_trt.models.draft import read_draft
from dflash_trt.models.target import read_target
from dflash_trt.training.draft_blocks import IGNORED, Batch, draw_batch, order_rows
from dflash_trt.training.draft_shape import DraftDesign, OwnLayer, shape_of
from dflash_trt.training.features import FeatureStore
from dflash_trt.training.target import TargetEnds, load_ends
from dflash_trt.training.trainer import Trainer, TrainerSettings, orthogonal, start_draft
from tests.reference.checkpoints import write_target
from tests.reference.deepspec import DeepSpecDraft
from tests.reference.dflash2 import Dflash2Draft
from tests.reference.draft import DraftConfig, ReferenceDraft
from tests.reference.eagle import ReferenceEagle
from tests.reference.generate import load_target
from tests.reference.mtp import PREFIX, ReferenceMtp, write_mtp

HIDDEN, VOCAB = 16, 50
SHAPE = DraftDesign(
    hidden_size=HIDDEN,
    intermediate_size=24,
    heads=4,
    kv_heads=2,
    head_dim=8,
    windows=(None, 3),
    block_size=4,
    mask_token_id=1,
    target_layer_ids=(0, 2),
    num_target_layers=4,
    vocab_size=VOCAB,
    max_position_embeddings=64,
    rope_theta=10_000.0,
)
DFLASH2 = replace(
    SHAPE, dflash2=Dflash2Sizes(4, 6, 20), logit_multiplier=0.5, logit_cap=4.0, windows=(None,)
)


def make_store(rows: int = 12, seed: int = 0) -> FeatureStore:
    generator = np.random.default_rng(seed)
    lengths = generator.integers(6, 20, rows)
    prompts = generator.integers(1, 4, rows)
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    total = int(lengths.sum())
    features = torch.from_numpy(generator.normal(size=(total, 3 * HIDDEN))).bfloat16()
    return FeatureStore(
        tokens=generator.integers(0, VOCAB, total).astype(np.int32),
        rows=np.stack([starts, prompts, lengths], 1).astype(np.int64),
        features=features.view(torch.uint16).numpy(),
    )


def embedding() -> torch.Tensor:
    return torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(7))


def spread(model: torch.nn.Module) -> None:
    """Changes every weight, norms too, to one that bfloat16 keeps."""
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.1).copy_(weight.bfloat16().float())


@pytest.mark.parametrize("shape", [SHAPE, replace(DFLASH2, windows=(None, 3))], ids=["1", "2"])
def test_every_block_is_what_the_reference_drafts(tmp_path: Path, shape: DraftDesign) -> None:
    model = start_draft(shape, None, 3)
    spread(model)
    model.save(tmp_path, ends())
    weights = dict(model.state_dict())
    table = embedding()
    reference = ReferenceDraft(DraftConfig.read(tmp_path), weights, table, table)
    if shape.dflash2 is not None:
        config = json.loads((tmp_path / "config.json").read_text())
        reference = Dflash2Draft(DraftConfig.read(tmp_path), weights, table, table)
        reference.settings = config | config["dflash_config"]

    features = torch.randn(2, 12, 2 * HIDDEN)
    anchors = torch.tensor([[1, 4, 11], [2, 2, 7]])
    ids = torch.full((2, 3, SHAPE.block_size), SHAPE.mask_token_id)
    ids[:, :, 0] = torch.tensor([[5, 6, 7], [8, 8, 9]])
    with torch.no_grad():
        hidden = model(features, anchors, table[ids])
        for row in range(2):
            for index, start in enumerate(anchors[row].tolist()):
                context = reference.project(features[row : row + 1, :start])
                wanted = reference.draft(ids[row, index, :1], start, context)
                torch.testing.assert_close(hidden[row, index], wanted.final_hidden[0, 1:])


def test_a_dflash_draft_that_goes_on_as_dflash2_drafts_what_it_did(tmp_path: Path) -> None:
    start_draft(replace(DFLASH2, dflash2=None, logit_cap=None), None, 3).save(tmp_path, ends())
    plain = start_draft(replace(DFLASH2, dflash2=None), tmp_path, 0)
    model = start_draft(DFLASH2, tmp_path, 0)
    added = model.state_dict().keys() - plain.state_dict().keys()
    assert all("conv" in name or name.startswith("candidate_selector.") for name in added)
    given = torch.randn(1, 12, 2 * HIDDEN), torch.tensor([[4, 11]]), torch.randn(1, 2, 4, HIDDEN)
    with torch.no_grad():
        assert model(*given).equal(plain(*given))
    selector = model.candidate_selector
    assert selector is not None and not selector.successor_codebook.any()
    assert float(selector.predecessor_codebook.detach().std()) == pytest.approx(0.02, rel=0.2)


def test_every_slot_of_dsparks_block_is_what_the_reference_drafts(tmp_path: Path) -> None:
    shape = replace(SHAPE, windows=(None, None), markov_rank=5)
    model = start_draft(shape, None, 3)
    head = model.markov_head
    assert head is not None and not head.markov_w2.weight.any(), "it learns what it moves"
    spread(model)
    plain = replace(shape, markov_rank=0)
    (tmp_path / "config.json").write_text(json.dumps(plain.config()))
    table = embedding()
    weights = dict(model.state_dict())
    base = ReferenceDraft(DraftConfig.read(tmp_path), weights, table, table)
    reference = DeepSpecDraft(base, (head.markov_w1.weight.data, head.markov_w2.weight.data))
    features, anchors = torch.randn(1, 12, 2 * HIDDEN), torch.tensor([[4, 11]])
    ids = torch.full((1, 2, shape.slots), shape.mask_token_id)
    ids[:, :, 0] = torch.tensor([[5, 6]])
    with torch.no_grad():
        hidden = model(features, anchors, table[ids])
        for index, start in enumerate(anchors[0].tolist()):
            context = reference.project(features[:, :start])
            wanted = reference.draft(ids[0, index, :1], start, context)
            before = wanted.ids[0, :-1]
            logits = hidden[0, index] @ table.T + head(before, slice(None))
            torch.testing.assert_close(logits, wanted.logits[0, 1:])


@pytest.mark.parametrize(
    "shape",
    [SHAPE, DFLASH2, replace(SHAPE, windows=(None, None), markov_rank=5)],
    ids=lambda shape: shape.kind,
)
def test_what_is_saved_is_a_checkpoint_of_the_same_shape(
    tmp_path: Path, shape: DraftDesign
) -> None:
    model = start_draft(shape, None, 0)
    model.save(tmp_path, ends())
    spec = read_draft(tmp_path)
    assert (spec.kind, spec.block_size, spec.markov_rank) == (shape.kind, 4, shape.markov_rank)
    assert shape_of(spec, VOCAB, shape.num_target_layers) == shape
    for name, weight in start_draft(shape, tmp_path, 0).state_dict().items():
        assert weight.equal(model.state_dict()[name].bfloat16().float()), name
    if shape.markov_rank:  # DeepSpec's loader wants copies of the target's matrices
        held = load_file(tmp_path / "model.safetensors")
        assert held["embed_tokens.weight"].equal(ends().embedding.bfloat16())


def test_half_of_a_label_is_what_the_target_believed() -> None:
    """Of a batch as the trainer makes it: written down once more, label by label, in float64."""
    trainer = make_trainer(replace(SETTINGS, soft=0.25))
    batch = draw_batch(trainer.store, [0, 1, 2], 4, SHAPE.block_size, seed=0, step=0)
    table, norm = embedding().double(), ends().norm.double()
    with torch.no_grad():
        ids = torch.full_like(batch.labels, SHAPE.mask_token_id)
        ids[:, :, 0] = batch.anchor_ids
        taps = batch.features[..., : 2 * HIDDEN].float()
        hidden = trainer.model(taps, batch.anchors, embedding()[ids]).double()
    total = weight_sum = 0.0
    for row, anchor, slot in torch.nonzero(batch.labels != IGNORED).tolist():
        said_at = int(batch.anchors[row, anchor]) + slot - 1
        stream = batch.features[row, said_at, 2 * HIDDEN :].double()
        truth = table @ (stream / (stream.square().mean() + 1e-6).sqrt() * norm)
        label = 0.25 * truth.softmax(0)
        label[batch.labels[row, anchor, slot]] += 0.75
        losses = -(table @ hidden[row, anchor, slot - 1]).log_softmax(0)
        weight = math.exp(-(slot - 1) / trainer.settings.gamma)
        total, weight_sum = total + weight * float(losses @ label), weight_sum + weight
    assert float(trainer.loss(batch).detach()) == pytest.approx(total / weight_sum, rel=1e-5)


def test_a_dflash2_draft_as_it_is_published_goes_on(tmp_path: Path) -> None:
    """All layers slide, and fields lie where Qwen3.8-27B-DFlash2 has them."""
    shape = replace(DFLASH2, windows=(48,), logit_multiplier=1.0, logit_cap=None)
    model = start_draft(shape, None, 0)
    model.save(tmp_path, ends())
    config = shape.config()
    config["dflash_config"]["block_size"] = config.pop("block_size")
    config["dflash_config"].pop("causal")
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": config.pop("rope_theta")}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert shape_of(read_draft(tmp_path), VOCAB, shape.num_target_layers) == shape
    went_on = start_draft(shape, tmp_path, 0).state_dict()
    wanted = model.state_dict()
    assert all(one.equal(wanted[name].bfloat16().float()) for name, one in went_on.items())


@pytest.mark.parametrize("soft", [0.0, 0.25])
def test_the_selectors_loss_is_of_candidates_behind_the_tokens_as_they_are(soft: float) -> None:
    """Slot by slot in float64; where the label is no candidate, only the head's loss is left."""
    torch.manual_seed(2)
    trainer = make_trainer(replace(SETTINGS, soft=soft), "DFlash 2")
    spread(trainer.model)
    model, table = trainer.model, embedding().double()
    selector, top_k = model.candidate_selector, 20
    assert selector is not None
    codes = {name: one.double() for name, one in selector.state_dict().items()}
    batch = draw_batch(trainer.store, [0, 1, 2], 4, SHAPE.block_size, seed=0, step=0)
    with torch.no_grad():
        ids = torch.full_like(batch.labels, SHAPE.mask_token_id)
        ids[:, :, 0] = batch.anchor_ids
        taps = batch.features[..., : 2 * HIDDEN].float()
        hidden = model(taps, batch.anchors, embedding()[ids]).double()
    sums, left_out = {"head": [0.0, 0.0], "selector": [0.0, 0.0]}, 0
    for row, anchor, slot in torch.nonzero(batch.labels != IGNORED).tolist():
        label = int(batch.labels[row, anchor, slot])
        before = int(batch.tokens[row, int(batch.anchors[row, anchor]) + slot - 1])
        state, weight = hidden[row, anchor, slot - 1], math.exp(-(slot - 1) / 4)
        unary = 4 * torch.tanh(0.5 * (table @ state) / 4)
        moved = codes["predecessor_codebook"][before] * (codes["hidden_projection.weight"] @ state)
        stream = batch.features[row, int(batch.anchors[row, anchor]) + slot - 1, 2 * HIDDEN :]
        truth = soft * (table @ ends().states(stream).double()).softmax(0)
        truth[label] += 1 - soft
        pairs = [("head", -float(truth @ unary.log_softmax(0)))]
        candidates = unary.topk(top_k).indices.tolist()
        if label in candidates:
            scores = unary[candidates] + codes["successor_codebook"][candidates] @ moved
            kept = truth[candidates] / truth[candidates].sum()
            pairs.append(("selector", -float(kept @ scores.log_softmax(0))))
        left_out += label not in candidates
        for name, loss in pairs:
            sums[name] = [sums[name][0] + weight * loss, sums[name][1] + weight]
    assert left_out and sums["selector"][1]
    wanted = sum(total / weights for total, weights in sums.values())
    assert float(trainer.loss(batch).detach()) == pytest.approx(wanted, rel=1e-5)
    cut = Trainer(model, ends(), trainer.store, replace(trainer.settings, head_tokens=20))
    # So many are drawn that all are looked at, under other places than their ids.
    assert float(cut.loss(batch).detach()) == pytest.approx(wanted, rel=1e-5)


def test_a_matrix_is_made_orthogonal() -> None:
    """The iteration stops near: singular values lie about one (K. Jordan et al.)."""
    matrix = torch.randn(24, 16, generator=torch.Generator().manual_seed(3))
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    found = orthogonal(matrix, torch.float32)
    values = torch.diagonal(u.T @ found @ v.T)
    assert 0.6 < values.min() < values.max() < 1.3
    torch.testing.assert_close(u @ torch.diag(values) @ v, found, atol=1e-4, rtol=0)
    narrow = orthogonal(matrix.T.contiguous(), torch.bfloat16)
    torch.testing.assert_close(narrow, found.T, atol=0.1, rtol=0)


def test_anchors_lie_in_answers_and_labels_are_the_tokens_behind_them() -> None:
    store = make_store()
    seen: set[tuple[int, int]] = set()
    for step in range(30):
        rows = [step % 12, (step + 5) % 12]
        batch = draw_batch(store, rows, 4, SHAPE.block_size, seed=0, step=step)
        again = draw_batch(store, rows, 4, SHAPE.block_size, seed=0, step=step)
        assert all(torch.equal(getattr(batch, name), getattr(again, name)) for name in NAMES)
        for index, row in enumerate(rows):
            offset, prompt, length = store.rows[row].tolist()
            tokens = store.tokens[offset : offset + length]
            used = [j for j in range(batch.labels.shape[1]) if batch.labels[index, j, 1] >= 0]
            places = batch.anchors[index, used].tolist()
            assert len(set(places)) == len(places) == min(4, length - 1 - prompt)
            for j, place in zip(used, places, strict=True):
                seen.add((row, place))
                assert prompt <= place < length - 1
                assert batch.anchor_ids[index, j] == tokens[place]
                wanted = [*tokens[place + 1 : place + 4].tolist(), IGNORED, IGNORED][:3]
                assert batch.labels[index, j].tolist() == [IGNORED, *wanted]
            bits = batch.features[index, :length].view(torch.uint16).numpy()
            assert (bits == store.features[offset : offset + length]).all()
    every = {(r, p) for r in range(12) for p in range(store.rows[r, 1], store.rows[r, 2] - 1)}
    assert len(seen) > 0.6 * len(every)


NAMES = ("features", "anchors", "anchor_ids", "labels")


def test_an_epoch_uses_every_row_once_in_another_order() -> None:
    store = make_store(rows=40)
    first, second = (order_rows(store, 4, 0, epoch) for epoch in (0, 1))
    assert sorted(chain(*first)) == sorted(chain(*second)) == list(range(40))
    assert first != second


def ends() -> TargetEnds:
    table = embedding()
    return TargetEnds(table, table, torch.linspace(0.5, 1.5, HIDDEN), 1e-6)


SETTINGS = TrainerSettings(steps=12, rows=4, anchors=4, head_tokens=None, learning_rate=5e-3)
KINDS = {
    "DFlash": replace(SHAPE, windows=(None,)),
    "DFlash 2": DFLASH2,
    "DSpark": replace(SHAPE, windows=(None,), markov_rank=5),
    "EAGLE-3": replace(SHAPE, windows=(None,), is_chain=True, mask_token_id=0),
    "MTP": replace(SHAPE, windows=(None,), is_chain=True, own_layer=OwnLayer(4, 1.0, {})),
}


def make_trainer(settings: TrainerSettings, kind: str = "DFlash") -> Trainer:
    return Trainer(start_draft(KINDS[kind], None, 0), ends(), make_store(), settings)


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_was_cut_ends_with_the_same_bytes(tmp_path: Path, kind: str) -> None:
    whole, begun = make_trainer(SETTINGS, kind), make_trainer(SETTINGS, kind).model.state_dict()
    whole.train(12)
    for until in (5, 7, 12):
        part = make_trainer(SETTINGS, kind)
        part.restore(tmp_path)
        assert part.step == {5: 0, 7: 5, 12: 7}[until]
        part.train(until)
        part.save(tmp_path)
    assert whole.is_done and part.losses == whole.losses and len(whole.losses) == 12
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(weight, part.model.state_dict()[name]), name
        assert not torch.equal(weight, begun[name]), f"{name} was not trained"


HEAD = KINDS["EAGLE-3"]


def test_every_chain_is_what_the_published_head_computes(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model, table = start_draft(HEAD, None, 3), embedding()
    spread(model)
    model.save(tmp_path, ends())
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
    start_draft(HEAD, None, 3).save(tmp_path, ends(), torch.tensor([3, 5, 40]))
    spec = read_draft(tmp_path)
    assert (spec.kind, spec.token_ids) == ("EAGLE-3", (3, 5, 40))
    assert spec.target_layer_ids == HEAD.target_layer_ids
    held = load_file(tmp_path / "model.safetensors")
    assert held["lm_head.weight"].equal(ends().head[[3, 5, 40]].bfloat16())
    assert held["t2d"].nonzero().flatten().tolist() == [3, 5, 40]


@pytest.mark.parametrize("published", [{"vision": True, "dtype": "bfloat16"}, {"tie": True}])
def test_every_chain_is_what_the_published_layer_computes(
    tmp_path: Path, published: dict[str, Any]
) -> None:
    """From the target's last stream on, in its checkpoint's place and saved again."""
    folder = write_mtp(write_target(tmp_path / "t", "qwen3_5", num_layers=4, **published))
    spec, target = read_target(folder), load_target(folder)
    shape = shape_of(read_draft(folder), spec.vocab_size, 4)
    model, reference = start_draft(shape, folder, 0), ReferenceMtp.load(folder, target)
    trainer = Trainer(model, load_ends(spec), make_store(), SETTINGS)
    tokens, anchors = torch.randint(0, spec.vocab_size, (20,)), torch.tensor([[1, 4, 12]])
    stream = 5 * torch.randn(20, spec.hidden_size)
    labels = torch.stack([tokens[at : at + 8] for at in anchors[0]])[None]
    batch = Batch(stream[None], anchors, tokens[anchors], labels, tokens[None])
    with torch.no_grad():
        states = trainer._states(batch, stream[None], anchors)
        for index, anchor in enumerate(anchors[0].tolist()):
            outputs = target.get_decoder().norm(stream[:anchor])
            for step in range(7):
                row = reference(tokens[1 : anchor + step + 1], outputs)[-1:]
                torch.testing.assert_close(states[0, index, step], row[0], rtol=1e-4, atol=1e-4)
                outputs = torch.cat([outputs, row])
    model.save(saved := tmp_path, load_ends(spec))
    whole, held = (load_file(one / "model.safetensors") for one in (folder, saved))
    whole = {name: one.bfloat16() for name, one in whole.items() if name.startswith(PREFIX)}
    assert held.keys() == whole.keys() and all(held[name].equal(whole[name]) for name in held)
    assert shape_of(read_draft(saved), spec.vocab_size, 4) == shape

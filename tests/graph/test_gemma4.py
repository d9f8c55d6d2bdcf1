"""A draft of a Gemma 4 has its target's ends: embeddings scaled, logits capped."""

from __future__ import annotations

import torch

from dflash_trt.decoding.replay.edits import add_output, draft_logits, load_graph
from tests.graph.runner import BOUND, GraphRunner, tokens
from tests.pairs import PairFactory
from tests.reference.compare import max_relative_error
from tests.reference.generate import hidden_taps

VOCAB, CONTEXT, CAP = 192, 40, 12.0


def test_a_draft_chooses_by_capped_logits_of_scaled_embeddings(make_pair: PairFactory) -> None:
    built = make_pair("gemma4", {"vocab": VOCAB, "tie": True}, {"target_layer_ids": [1, 5]})
    model = load_graph(built.bundle.folder / "draft.onnx")
    capped = draft_logits(model)
    add_output(model, capped)
    runner = GraphRunner(built, models={"draft": model})
    ids = tokens(VOCAB, 1, CONTEXT + 1)
    runner.target(ids[:, :CONTEXT], [0])
    got = runner.draft(ids[:, CONTEXT].tolist(), [CONTEXT], 8)[capped]
    reference, given = built.reference_draft, torch.tensor(ids)
    taps = hidden_taps(built.reference, given[:, :CONTEXT], reference.config.target_layer_ids)
    logits = reference.draft(given[:, CONTEXT], CONTEXT, reference.project(taps)).logits[0, 1:]
    assert max_relative_error(got, CAP * torch.tanh(logits / CAP)) <= BOUND
    assert max_relative_error(got, logits) > 0.05
    stored = built.reference.get_input_embeddings().weight
    assert max_relative_error(reference.embed, 8 * stored) < 1e-6  # the reference has √64 too

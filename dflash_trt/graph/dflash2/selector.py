"""The candidate selector: a walk through each slot's likeliest tokens, from the anchor on.

Slot t's candidates b are the `top_k` highest of its scores U. With codes A of the token before and
B of a candidate, and P h of the slot's normed hidden row, it chooses the highest
U(b) + Σ_r A[before, r] · (P h)[r] · B[b, r]; of equal ones the lowest token, as all choices do.
"""

from __future__ import annotations

from dataclasses import replace

from onnx import TensorProto

from dflash_trt.graph.bindings import BLOCK_IDS
from dflash_trt.graph.layers import look_up
from dflash_trt.graph.model_builder import ModelBuilder
from dflash_trt.models.draft import DraftSpec

WALK = "head/walk"
SCORES, IDS = f"{WALK}/slot_{{}}/both_scores", f"{WALK}/slot_{{}}/own_ids"
"""Values [B,1,top_k,1] of slot `{}`: its candidates' scores, and which tokens they are."""


def own_scores(head: ModelBuilder, draft: DraftSpec) -> ModelBuilder:
    """The target's head with the draft's multiplier and cap: they weigh scores against codes."""
    multiplier, cap = draft.logit_multiplier, draft.logit_cap
    return replace(head, spec=replace(head.spec, logit_multiplier=multiplier, logit_cap=cap))


def choose_by_walk(
    model: ModelBuilder, normed: str, scores: str, tokens: str | None, top_k: int, slots: int
) -> str:
    """Chooses a token for each masked slot [B,n], n up to `slots`, of its row [B·n,H].

    `scores` [B·n,K] are those of the value `tokens` [K], None where K is all. The walk is unrolled,
    as engines want it: in a call of fewer slots the rest choose again from the last, and are cut
    off.
    """
    b, batch = model.b, model.rows.batch
    zero, one = b.integers(0), b.integers(1)

    def by_slot(value: str, *trailing: int) -> str:
        sizes = b.integers(-1, *trailing)
        shape = b.node("Concat", [batch, sizes], f"{value.rpartition('/')[2]}_shape", axis=0)
        return b.node("Reshape", [value, shape], f"{value.rpartition('/')[2]}_by_slot")

    with b.scope("walk"):
        scores, places = _candidates(model, scores, top_k)
        ids = places if tokens is None else b.node("Gather", [tokens, places], "ids", axis=0)
        gate = model.linear(normed, "selector_gate", name="gate")
        gate = b.node("Unsqueeze", [gate, one], "gates")
        codes = b.node("Mul", [look_up(model, "successors", ids), gate], "codes")
        rank = model.entry("successors").shape[1]
        codes = by_slot(codes, top_k, rank)
        scores, ids = by_slot(scores, top_k, 1), by_slot(ids, top_k, 1)
        last = b.node("Sub", [model.rows.count, b.integers(2)], "last_slot")
        before = b.node("Slice", [BLOCK_IDS, zero, one, one], "anchor_column")
        before = b.node("Reshape", [before, b.integers(-1)], "anchor")
        chosen: list[str] = []
        for slot in range(slots):
            with b.scope(f"slot_{slot}"):
                index = b.node("Min", [b.integers(slot), last], "index")
                own, held, known = (
                    b.node("Gather", [value, index], name, axis=1)
                    for value, name in ((codes, "own_codes"), (scores, "scores"), (ids, "own_ids"))
                )
                code = look_up(model, "predecessors", before)
                code = b.node("Unsqueeze", [code, b.integers(1, 3)], "code_column")
                pair = b.node("MatMul", [own, code], "pair_scores")
                both = b.node("Add", [held, pair], "both_scores")
                place = b.node("ArgMax", [both], "choice", axis=2, keepdims=1)
                token = b.node("GatherElements", [known, place], "token", axis=2)
                before = b.node("Reshape", [token, b.integers(-1)], "before")
                chosen.append(b.node("Unsqueeze", [before, one], "column"))
        every = b.node("Concat", chosen, "every_token", axis=1)
        end = b.node("Sub", [model.rows.count, one], "masks")
        return b.node("Slice", [every, zero, end, one], "tokens")


def _candidates(model: ModelBuilder, scores: str, top_k: int) -> tuple[str, str]:
    """The `top_k` highest of scores [T,K], and where they stand: [T,top_k] in that order.

    So of equal scores in the walk the first is the lowest token.
    """
    b = model.b
    places = "/".join([*b.scopes, "places"])
    scores = b.top_k(scores, b.integers(top_k), "highest", indices=places)
    # Places are below 2^24, which float32 tells apart; engines sort no integers.
    order = b.node("Neg", [b.node("Cast", [places], "wide", to=TensorProto.FLOAT)], "backwards")
    ascending = "/".join([*b.scopes, "ascending"])
    b.top_k(order, b.integers(top_k), "by_token", indices=ascending)
    return (
        b.node("GatherElements", [scores, ascending], "candidate_scores", axis=1),
        b.node("GatherElements", [places, ascending], "candidate_places", axis=1),
    )

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
SCORES, IDS, START, MASKS = (
    f"{WALK}/{name}" for name in ("both_scores", "slot_ids", "start", "masks")
)
PLACE = f"{WALK}/slot_{{}}/place"
"""Values: scores [B,n,top_k,top_k] of each slot's candidates behind each of the slot before;
which tokens they are [B,n,top_k]; the place [B,1] before the first slot; n [1]; the place that
slot `{}` chooses [B,1]."""


def own_scores(head: ModelBuilder, draft: DraftSpec) -> ModelBuilder:
    """The target's head with the draft's multiplier and cap: they weigh scores against codes."""
    multiplier, cap = draft.logit_multiplier, draft.logit_cap
    return replace(head, spec=replace(head.spec, logit_multiplier=multiplier, logit_cap=cap))


def choose_by_walk(
    model: ModelBuilder, normed: str, scores: str, tokens: str | None, top_k: int, slots: int
) -> str:
    """Chooses a token for each masked slot [B,n], n up to `slots`, of its row [B·n,H].

    `scores` [B·n,K] are those of the value `tokens` [K], None where K is all. What the best is
    behind each candidate of the slot before is found for all slots at once; the walk then looks it
    up. It is unrolled, as engines want it: in a call of fewer slots the rest choose again from the
    last, and are cut off.
    """
    b, batch = model.b, model.rows.batch
    zero, one, two = b.integers(0), b.integers(1), b.integers(2)
    rank = model.entry("successors").shape[1]

    def by_slot(value: str, name: str, *trailing: int) -> str:
        shape = b.node("Concat", [batch, b.integers(-1, *trailing)], f"{name}_shape", axis=0)
        return b.node("Reshape", [value, shape], name)

    with b.scope("walk"):
        scores, places = _candidates(model, scores, top_k)
        ids = places if tokens is None else b.node("Gather", [tokens, places], "ids", axis=0)
        gate = model.linear(normed, "selector_gate", name="gate")
        gate = b.node("Unsqueeze", [gate, one], "gates")
        codes = b.node("Mul", [look_up(model, "successors", ids), gate], "codes")
        codes = by_slot(codes, "slot_codes", top_k, rank)
        columns = b.node("Transpose", [codes], "code_columns", perm=[0, 1, 3, 2])
        scores, ids = by_slot(scores, "slot_scores", 1, top_k), by_slot(ids, "slot_ids", top_k)
        anchor = b.node("Slice", [BLOCK_IDS, zero, one, one], "anchor")
        first = b.node("Expand", [by_slot(anchor, "anchors", 1), b.integers(1, 1, top_k)], "first")
        earlier = b.node("Slice", [ids, zero, b.integers(-1), one], "earlier_ids")
        before = b.node("Concat", [first, earlier], "before", axis=1)
        with b.scope("behind"):
            rows = look_up(model, "predecessors", before)
        pair = b.node("MatMul", [rows, columns], "pair_scores")
        best = b.node(
            "ArgMax", [b.node("Add", [pair, scores], "both_scores")], "best", axis=3, keepdims=0
        )
        last = b.node("Squeeze", [b.node("Sub", [model.rows.count, two], "last")], "last_slot")
        place = b.node("Mul", [anchor, zero], "start")
        chosen: list[str] = []
        for slot in range(slots):
            with b.scope(f"slot_{slot}"):
                index = b.node("Min", [b.integers(slot, scalar=True), last], "index")
                behind = b.node("Gather", [best, index], "behind", axis=1)
                place = b.node("GatherElements", [behind, place], "place", axis=1)
                chosen.append(place)
        every = b.node("Concat", chosen, "every_place", axis=1)
        end = b.node("Sub", [model.rows.count, one], "masks")
        every = b.node("Slice", [every, zero, end, one], "chosen_places")
        every = b.node("Unsqueeze", [every, two], "chosen_columns")
        found = b.node("GatherElements", [ids, every], "chosen_ids", axis=2)
        return b.node("Squeeze", [found, two], "tokens")


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

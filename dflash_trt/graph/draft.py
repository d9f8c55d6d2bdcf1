"""`draft.onnx`: one pass of the block-diffusion drafter over [anchor, mask, …]."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import onnx

from dflash_trt.graph.bindings import BLOCK_IDS, CACHE_START, DRAFT_TOKEN_IDS
from dflash_trt.graph.call_rows import Rows
from dflash_trt.graph.dflash2.selector import choose_by_walk, own_scores
from dflash_trt.graph.eagle import EagleChain
from dflash_trt.graph.form import CPU_FORM, GraphForm
from dflash_trt.graph.layers import attention, choose_among, embed, gated_mlp, look_up
from dflash_trt.graph.model import GraphBuilder
from dflash_trt.graph.model_builder import ModelBuilder
from dflash_trt.graph.rope_tables import RopeTables, draft_tables
from dflash_trt.graph.tensors import cache_layout, declare, graph_tensors
from dflash_trt.models.draft import DraftSpec
from dflash_trt.models.pair_check import Pair
from dflash_trt.models.safetensors_header import TensorEntry

MARKOV_CHOICE = "choice_{}"
"""Name of the node that chooses slot `{}` of DSpark's chain."""


def build_draft(
    pair: Pair,
    tables: Mapping[str, TensorEntry],
    locate: Callable[[TensorEntry], str],
    form: GraphForm = CPU_FORM,
) -> onnx.ModelProto:
    """Builds the draft graph of `pair` (arXiv 2602.06036, 2607.05147).

    block_ids [B,S] are the anchor and masks, token_ids [B,S] the anchor and a draft per mask.
    Caches hold injected features below cache_start; the block's own K and V behind them are scratch
    that the next injection overwrites. `tables` hold the draft's head as well, where it chooses
    among some tokens (see `draft_head`).
    """
    target, draft = pair.target, pair.draft
    b = GraphBuilder("draft", locate, form, tables)
    layout = cache_layout(form, target.sizes, draft.sizes)
    declare(b, graph_tensors("draft", form, layout, target.vocab_size))
    drops_last = draft.traits.is_chain or draft.anchor_drafts
    ids = _drafting_slots(b) if drops_last else BLOCK_IDS
    rows = Rows(b, ids, CACHE_START)
    model = ModelBuilder(b, "draft", draft, rows, RopeTables(draft_tables(target, draft), tables))
    head = ModelBuilder(b, "target", target, rows, RopeTables("target", tables))
    if draft.traits.is_chain:  # an EAGLE-3 head's (arXiv 2503.01840)
        drafts = EagleChain(model, head, draft, tables).drafts()
        with b.scope("head"):
            _write_drafts(b, drafts)
        return b.finish()
    embedder, chooser = (
        model if role in draft.owned else head for role in ("embed_tokens", "lm_head")
    )
    x = embed(embedder, draft.own_embedding_scale)
    for index in range(draft.num_layers):
        layer = model.layer(index)
        with b.scope(f"draft_layers.{index}"):
            x = gated_mlp(layer, attention(layer, x))

    with b.scope("head"):
        flat = x if draft.anchor_drafts else _masked_rows(b, x, rows, draft.hidden_size)
        normed = model.rms_norm(flat, "norm", "norm")
        if draft.dflash2 is not None:
            known = pair.draft_token_ids
            top_k = min(draft.dflash2.top_k, target.vocab_size if known is None else len(known))
            scores, token_ids = choose_among(own_scores(chooser, draft), tables, normed)
            masks = draft.block_size - 1
            _write_drafts(b, choose_by_walk(model, normed, scores, token_ids, top_k, masks))
            return b.finish()
        logits, token_ids = choose_among(chooser, tables, normed)
        if draft.markov_rank:
            count = target.vocab_size if draft.token_ids is None else len(draft.token_ids)
            choice = _choose_in_turn(model, draft, logits, count, token_ids)
        else:
            choice = b.node("ArgMax", [logits], "choice", axis=1, keepdims=0)
            if token_ids is not None:
                choice = b.node("Gather", [token_ids, choice], "chosen_ids", axis=0)
        shape = b.node("Concat", [rows.batch, b.integers(-1)], "drafts_shape", axis=0)
        drafts = b.node("Reshape", [choice, shape], "drafts")
        _write_drafts(b, drafts)
    return b.finish()


def _choose_in_turn(
    model: ModelBuilder, draft: DraftSpec, logits: str, count: int, token_ids: str | None
) -> str:
    """DSpark's Markov head over logits [B·n,K] of n slots that draft: its choices [B,n].

    Each is argmax(logits + W2 W1[token before]), before the first the anchor (arXiv 2607.05147),
    of `count` tokens K, whose ids `token_ids` holds where they are not all. The chain is unrolled,
    as engines want it: in a call of fewer slots the rest choose again from the last, and are cut
    off.
    """
    b, rows = model.b, model.rows
    zero, one, axis = b.integers(0), b.integers(1), b.integers(1)
    drafted = rows.count
    if not draft.anchor_drafts:
        drafted = b.node("Sub", [rows.count, one], "drafted")
        shape = b.node("Concat", [rows.batch, drafted, b.integers(count)], "slots_shape", axis=0)
    else:
        shape = rows.shape(count)
    blocks = b.node("Reshape", [logits, shape], "slot_logits")
    last = b.node("Sub", [drafted, one], "last_slot")
    before = b.node("Slice", [BLOCK_IDS, zero, one, axis], "first_before")
    before = b.node("Reshape", [before, b.integers(-1)], "before")
    choices: list[str] = []
    for slot in range(draft.block_size - 1):
        with b.scope(f"slot_{slot}"):
            index = b.node("Min", [b.integers(slot), last], "index")
            own = b.node("Gather", [blocks, index], "own", axis=1)
            own = b.node("Reshape", [own, b.integers(-1, count)], "own_rows")
            moved = model.linear(look_up(model, "markov_w1", before), "markov_w2", residual=own)
        before = b.node("ArgMax", [moved], MARKOV_CHOICE.format(slot), axis=1, keepdims=0)
        if token_ids is not None:
            before = b.node("Gather", [token_ids, before], f"token_{slot}", axis=0)
        choices.append(b.node("Unsqueeze", [before, axis], f"column_{slot}"))
    every = b.node("Concat", choices, "every_choice", axis=1)
    return b.node("Slice", [every, zero, drafted, axis], "choices")


def _write_drafts(b: GraphBuilder, drafts: str) -> None:
    """The anchors, and drafts [B,S-1] behind them."""
    bounds = [b.integers(0), b.integers(1), b.integers(1)]
    anchor = b.node("Slice", [BLOCK_IDS, *bounds], "anchor")
    b.node("Concat", [anchor, drafts], "token_ids", output=DRAFT_TOKEN_IDS, axis=1)


def _drafting_slots(b: GraphBuilder) -> str:
    """block_ids [B,S-1] without the last mask: S - 1 slots draft what S rows verify."""
    with b.scope("rows"):
        bounds = [b.integers(0), b.integers(-1), b.integers(1)]
        return b.node("Slice", [BLOCK_IDS, *bounds], "drafting_slots")


def _masked_rows(b: GraphBuilder, x: str, rows: Rows, hidden_size: int) -> str:
    """Of x [B·S,H] the rows [B·(S-1),H] of masks: the anchor's drafts nothing."""
    blocks = b.node("Reshape", [x, rows.shape(hidden_size)], "blocks")
    one, end, slot_axis = b.integers(1), b.integers(2**31 - 1), b.integers(1)
    slots = b.node("Slice", [blocks, one, end, slot_axis], "masked_slots")
    return b.node("Reshape", [slots, b.integers(-1, hidden_size)], "masked_rows")

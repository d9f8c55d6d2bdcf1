"""`draft.onnx`: one pass of the block-diffusion drafter over [anchor, mask, …]."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import onnx

from dflash_trt.checkpoints.pair import Pair
from dflash_trt.checkpoints.safetensors_header import TensorEntry
from dflash_trt.graph.bindings import BLOCK_IDS, CACHE_START, DRAFT_TOKEN_IDS
from dflash_trt.graph.draft_head import choose_among
from dflash_trt.graph.form import CPU_FORM, GraphForm
from dflash_trt.graph.layers import attention, embed, gated_mlp
from dflash_trt.graph.model import GraphBuilder
from dflash_trt.graph.model_builder import ModelBuilder
from dflash_trt.graph.rows import Rows
from dflash_trt.graph.tables import RopeTables, draft_tables
from dflash_trt.graph.tensors import cache_layout, declare, graph_tensors


def build_draft(
    pair: Pair,
    tables: Mapping[str, TensorEntry],
    locate: Callable[[TensorEntry], str],
    form: GraphForm = CPU_FORM,
) -> onnx.ModelProto:
    """Builds the draft graph of `pair` (arXiv 2602.06036).

    block_ids [B,S] are the anchor and masks, token_ids [B,S] the anchor and a draft per mask.
    Caches hold injected features below cache_start; the block's own K and V behind them are scratch
    that the next injection overwrites. `tables` hold the draft's head as well, where it chooses
    among some tokens (see `draft_head`).
    """
    target, draft = pair.target, pair.draft
    b = GraphBuilder("draft", locate, form)
    layout = cache_layout(form, target.sizes, draft.sizes)
    declare(b, graph_tensors("draft", form, layout, target.vocab_size))
    rows = Rows(b, BLOCK_IDS, CACHE_START)
    model = ModelBuilder(b, "draft", draft, rows, RopeTables(draft_tables(target, draft), tables))
    head = ModelBuilder(b, "target", target, rows, RopeTables("target", tables))
    x = embed(head)
    for index in range(draft.num_layers):
        layer = model.layer(index)
        with b.scope(f"draft_layers.{index}"):
            x = gated_mlp(layer, attention(layer, x))

    with b.scope("head"):
        blocks = b.node("Reshape", [x, rows.shape(draft.hidden_size)], "blocks")
        one, end, slot_axis = b.integers(1), b.integers(2**31 - 1), b.integers(1)
        slots = b.node("Slice", [blocks, one, end, slot_axis], "masked_slots")
        flat = b.node("Reshape", [slots, b.integers(-1, draft.hidden_size)], "masked_rows")
        normed = model.rms_norm(flat, "norm", "norm")
        logits, token_ids = choose_among(head, tables, normed)
        choice = b.node("ArgMax", [logits], "choice", axis=1, keepdims=0)
        if token_ids is not None:
            choice = b.node("Gather", [token_ids, choice], "chosen_ids", axis=0)
        shape = b.node("Concat", [rows.batch, b.integers(-1)], "drafts_shape", axis=0)
        drafts = b.node("Reshape", [choice, shape], "drafts")
        anchor = b.node("Slice", [BLOCK_IDS, b.integers(0), one, slot_axis], "anchor")
        b.node("Concat", [anchor, drafts], "token_ids", output=DRAFT_TOKEN_IDS, axis=1)
    return b.finish()

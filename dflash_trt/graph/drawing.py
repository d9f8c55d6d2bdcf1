"""The end of a graph that draws tokens itself; a target's settles what a step accepts, too.

The next step's block and where it starts are then on the device, without the host.
"""

from __future__ import annotations

from dflash_trt.graph.acceptance import accept_function
from dflash_trt.graph.bindings import (
    ACCEPTED,
    CACHE_START,
    CHOICE_IDS,
    DRAFT_LOGITS,
    LOGIT_ROWS,
    NEW_START,
    NEW_TOKENS,
    NEXT_BLOCK_IDS,
    SAMPLING,
    TOKEN_IDS,
)
from dflash_trt.graph.form import Precision
from dflash_trt.graph.model import GraphBuilder
from dflash_trt.graph.row_sample import row_sample_function
from dflash_trt.graph.rows import Rows


def draw_tokens(b: GraphBuilder, logits: str) -> None:
    """Logits [B,R,V] of the rows logit_rows [B,R] to choice_ids [B,R].

    A choice's position is the one behind its row. -1 where a row's logits are not finite.
    """
    with b.scope("draw"):
        start = b.node("Unsqueeze", [CACHE_START, b.integers(1)], "start_column")
        row_positions = b.node("Add", [start, LOGIT_ROWS], "row_positions")
        one = b.integers(1, scalar=True)
        positions = b.node("Add", [row_positions, one], "positions")
        operands = [logits, positions, SAMPLING]
        b.call(row_sample_function(), operands, "row_sample", outputs=[CHOICE_IDS])


def settle_step(b: GraphBuilder, mask_token_id: int) -> None:
    """What the choices settle of token_ids [B,S] at logit_rows [B,R], from cache_start [B] on.

    With all rows of a step, next_block_ids and new_start are the block_ids and cache_start of the
    next. Where there is no bonus token that block begins with token 0, which has an embedding: the
    host sees the -1 later and drops the block.
    """
    with b.scope("settle"):
        zero, one = b.integers(0, scalar=True), b.integers(1, scalar=True)
        picked = b.node("GatherElements", [TOKEN_IDS, LOGIT_ROWS], "picked_ids", axis=1)
        first_row = b.node("Gather", [LOGIT_ROWS, zero], "first_row", axis=1)
        picked_start = b.node("Add", [CACHE_START, first_row], "picked_start")
        bonus = "head/settle/bonus"
        outputs = [ACCEPTED, NEW_TOKENS, bonus, NEW_START]
        b.call(accept_function(), [picked, CHOICE_IDS, picked_start], "accept", outputs=outputs)
        count = b.node("Shape", [LOGIT_ROWS], "row_count", start=1, end=2)
        count = b.node("Squeeze", [count], "row_count_scalar")
        row = b.node("Range", [zero, count, one], "row")
        is_anchor = b.node("Equal", [row, zero], "is_anchor")
        known = b.node("Max", [bonus, zero], "known_bonus")
        anchor = b.node("Unsqueeze", [known, b.integers(1)], "anchor_column")
        mask = b.integers(mask_token_id, scalar=True)
        b.node("Where", [is_anchor, anchor, mask], "next_block", output=NEXT_BLOCK_IDS)


def couple_drafts(
    b: GraphBuilder, rows: Rows, logits: str, likeliest: str, *, anchor_drafts: bool
) -> str:
    """Drafts [B,N] of logits [T,V] that are drawn with the target's noise (sampling/coupling.py).

    A graph that doesn't draw keeps the `likeliest` [B,N] and tells the logits, by which its
    executor's caller couples them.
    """
    sharpness = b.form.sharpness
    if sharpness is None:
        raise ValueError("a form without sharpness couples nothing")
    count = b.node("Shape", [likeliest], "draft_count", start=1, end=2)
    shape = b.node("Concat", [rows.batch, count, b.integers(-1)], "logits_shape", axis=0)
    if not b.form.draws:
        b.node("Reshape", [logits, shape], "draft_logits", output=DRAFT_LOGITS)
        return likeliest
    wide = b.widen(b.node("Reshape", [logits, shape], "draft_logits"), "wide_draft_logits")
    first = b.integers(0)
    scale = b.constant("sharpness", [len(sharpness), 1], sharpness, Precision.FLOAT32)
    scale = b.node("Slice", [scale, first, count, first], "used_sharpness")
    sharp = b.node("Mul", [wide, scale], "sharp_logits")
    # A mask drafts its own position; where the anchor drafts too, each slot the one behind it.
    if anchor_drafts:
        positions = b.node("Add", [rows.positions, b.integers(1)], "draft_positions")
    else:
        bounds = [b.integers(1), b.integers(2**31 - 1), b.integers(1)]
        positions = b.node("Slice", [rows.positions, *bounds], "draft_positions")
    (drafts,) = b.call(row_sample_function(), [sharp, positions, SAMPLING], "row_sample")
    return drafts

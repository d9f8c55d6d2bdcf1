"""The end of a target's graph that draws tokens itself, and settles what a step accepts.

What the next step needs, its draft's block and where it starts, then is there without the host.
"""

from __future__ import annotations

from dflash_trt.graph.acceptance import accept_function
from dflash_trt.graph.bindings import (
    ACCEPTED,
    CHOICE_IDS,
    NEW_START,
    NEW_TOKENS,
    NEXT_BLOCK_IDS,
    SAMPLING,
)
from dflash_trt.graph.model import GraphBuilder
from dflash_trt.graph.row_sample import row_sample_function


def draw_tokens(b: GraphBuilder, logits: str, start: str, logit_rows: str) -> None:
    """Logits [B,R,V] of the rows logit_rows [B,R] to choice_ids [B,R].

    A choice's position is the one behind its row. -1 where a row's logits are not finite.
    """
    with b.scope("draw"):
        row_positions = b.node("Add", [_column(b, start, "start"), logit_rows], "row_positions")
        one = b.integers(1, scalar=True)
        positions = b.node("Add", [row_positions, one], "positions")
        operands = [logits, positions, SAMPLING]
        b.call(row_sample_function(), operands, "row_sample", outputs=[CHOICE_IDS])


def settle_step(b: GraphBuilder, ids: str, start: str, logit_rows: str, mask_token_id: int) -> None:
    """What the choices settle of the tokens ids [B,S] at logit_rows [B,R], from start [B] on.

    Where these are all rows of a step, next_block_ids and new_start are the block_ids and
    cache_start of the next. Where there is no bonus token, that block begins with token 0: an
    embedding is looked up with it before the host has seen the -1, and drops what comes of it.
    """
    with b.scope("settle"):
        zero, one = b.integers(0, scalar=True), b.integers(1, scalar=True)
        picked = b.node("GatherElements", [ids, logit_rows], "picked_ids", axis=1)
        first_row = b.node("Gather", [logit_rows, zero], "first_row", axis=1)
        picked_start = b.node("Add", [start, first_row], "picked_start")
        bonus = "head/settle/bonus"
        b.call(
            accept_function(),
            [picked, CHOICE_IDS, picked_start],
            "accept",
            outputs=[ACCEPTED, NEW_TOKENS, bonus, NEW_START],
        )
        count = b.node("Shape", [logit_rows], "row_count", start=1, end=2)
        count = b.node("Squeeze", [count], "row_count_scalar")
        row = b.node("Range", [zero, count, one], "row")
        is_anchor = b.node("Equal", [row, zero], "is_anchor")
        known = b.node("Max", [bonus, zero], "known_bonus")
        anchor, mask = _column(b, known, "anchor"), b.integers(mask_token_id, scalar=True)
        b.node("Where", [is_anchor, anchor, mask], "next_block", output=NEXT_BLOCK_IDS)


def _column(b: GraphBuilder, values: str, name: str) -> str:
    """[B] to [B,1]."""
    return b.node("Unsqueeze", [values, b.integers(1)], f"{name}_column")

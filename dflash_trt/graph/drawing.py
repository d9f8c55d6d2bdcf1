"""The end of a graph that draws tokens itself; a target's settles what a step accepts, too.

The next step's block and where it starts are then on the device, without the host.
"""

from __future__ import annotations

import onnx

from dflash_trt.graph import bindings as io
from dflash_trt.graph.functions import define
from dflash_trt.graph.model import GraphBuilder
from dflash_trt.graph.row_sample import row_sample_function

# accepted is the index of the first draft that is not the target's choice. The zero behind the
# last draft makes sure that there is one.
_ACCEPT = """
accept (token_ids, choice_ids, cache_start) => (accepted, new_tokens, bonus, new_start)
{
    let zero = 0, one = 1, none = -1, first = [1], end = [2147483647], last = [-1]
    let ahead = [0, 0, 0, 1]
    drafts = Slice (token_ids, first, end, first)
    let start = [0]
    guesses = Slice (choice_ids, start, last, first)
    equal = Equal (drafts, guesses)
    matches = Cast <to = 6> (equal)
    sealed = Pad (matches, ahead)
    count = ArgMin <axis = 1, keepdims = 0> (sealed)
    accepted = Cast <to = 6> (count)
    column = Unsqueeze (count, first)
    shape = Shape <start = 1, end = 2> (choice_ids)
    rows = Squeeze (shape)
    row = Range (zero, rows, one)
    kept = LessOrEqual (row, column)
    new_tokens = Where (kept, choice_ids, none)
    picked = GatherElements <axis = 1> (choice_ids, column)
    bonus = Squeeze (picked, first)
    moved = Add (cache_start, count)
    new_start = Add (moved, one)
}
"""


def accept_function() -> onnx.FunctionProto:
    """`dflash::accept`: sampling/acceptance.py's rule for one step of B sequences of S rows.

    token_ids int64 [B,S] (the anchor, then the drafts), choice_ids int64 [B,S] (the target's
    token after each), cache_start int64 [B]. accepted int32 [B]; new_tokens int64 [B,S], the
    accepted drafts, the bonus, then -1; bonus int64 [B]; new_start int64 [B].
    """
    return define(_ACCEPT)


def draw_tokens(b: GraphBuilder, logits: str) -> None:
    """Logits [B,R,V] of the rows logit_rows [B,R] to choice_ids [B,R].

    A choice's position is the one behind its row. -1 where a row's logits are not finite.
    """
    with b.scope("draw"):
        start = b.node("Unsqueeze", [io.CACHE_START, b.integers(1)], "start_column")
        row_positions = b.node("Add", [start, io.LOGIT_ROWS], "row_positions")
        one = b.integers(1, scalar=True)
        positions = b.node("Add", [row_positions, one], "positions")
        operands = [logits, positions, io.SAMPLING]
        b.call(row_sample_function(), operands, "row_sample", outputs=[io.CHOICE_IDS])


def settle_step(b: GraphBuilder, mask_token_id: int) -> None:
    """What the choices settle of token_ids [B,S] at logit_rows [B,R], from cache_start [B] on.

    With all rows of a step, next_block_ids and new_start are the block_ids and cache_start of the
    next. Where there is no bonus token that block begins with token 0, which has an embedding: the
    host sees the -1 later and drops the block.
    """
    with b.scope("settle"):
        zero, one = b.integers(0, scalar=True), b.integers(1, scalar=True)
        picked = b.node("GatherElements", [io.TOKEN_IDS, io.LOGIT_ROWS], "picked_ids", axis=1)
        first_row = b.node("Gather", [io.LOGIT_ROWS, zero], "first_row", axis=1)
        picked_start = b.node("Add", [io.CACHE_START, first_row], "picked_start")
        bonus = "head/settle/bonus"
        outputs = [io.ACCEPTED, io.NEW_TOKENS, bonus, io.NEW_START]
        b.call(accept_function(), [picked, io.CHOICE_IDS, picked_start], "accept", outputs=outputs)
        count = b.node("Shape", [io.LOGIT_ROWS], "row_count", start=1, end=2)
        count = b.node("Squeeze", [count], "row_count_scalar")
        row = b.node("Range", [zero, count, one], "row")
        is_anchor = b.node("Equal", [row, zero], "is_anchor")
        known = b.node("Max", [bonus, zero], "known_bonus")
        anchor = b.node("Unsqueeze", [known, b.integers(1)], "anchor_column")
        mask = b.integers(mask_token_id, scalar=True)
        b.node("Where", [is_anchor, anchor, mask], "next_block", output=io.NEXT_BLOCK_IDS)

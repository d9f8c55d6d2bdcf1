"""`dflash::accept`: the rule of sampling/acceptance.py as an operation over a batch."""

from __future__ import annotations

import onnx

from dflash_trt.graph.functions import define

# accepted is the index of the first draft that is not the target's choice. The zero behind the
# last draft makes sure that there is one.
_ACCEPT = """
accept (token_ids, choice_ids, cache_start) => (accepted, new_tokens, bonus, new_start)
{
    zero = Constant <value_int = 0> ()
    one = Constant <value_int = 1> ()
    none = Constant <value_int = -1> ()
    first = Constant <value_ints = [1]> ()
    end = Constant <value_ints = [2147483647]> ()
    last = Constant <value_ints = [-1]> ()
    ahead = Constant <value_ints = [0, 0, 0, 1]> ()
    drafts = Slice (token_ids, first, end, first)
    start = Constant <value_ints = [0]> ()
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
    """`dflash::accept`: what one verify step settles for B sequences of S rows.

    token_ids int64 [B,S] (the anchor, then the drafts), choice_ids int64 [B,S] (the target's
    token after each), cache_start int64 [B]. accepted int32 [B]; new_tokens int64 [B,S], the
    accepted drafts, the bonus, then -1; bonus int64 [B]; new_start int64 [B].
    """
    return define(_ACCEPT)

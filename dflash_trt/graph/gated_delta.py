"""`dflash::gated_delta_step`: a Gated DeltaNet layer's recurrence, which drafts may be rejected of.

C channels of q, k and v, N value heads of D, P rows that a call may take back (`GraphForm.replay`).
A sequence keeps a state and its last P + kernel - 1 raw rows, and a call runs again what earlier
ones have left to it; see docs/design/recurrent-state.md.
"""

from __future__ import annotations

import math

import onnx

from dflash_trt.graph.form import GraphForm
from dflash_trt.graph.functions import define
from dflash_trt.hardware.kernels import has_recurrent_kernel
from dflash_trt.models.sizes import RecurrentSizes

IDLE = -1
"""What an idle sequence of an engine's call has for rows_end."""

STEP = "gated_delta_step"
"""The function's name, and its kernel's."""

ALIGNED_ELEMENTS = 64
"""256 bytes of float32."""

# Old rows stand before the call's: index j of them is position cache_start - L + j, and lies in
# `rows` at j + cache_start - rows_end. What is left to replay differs by sequence: the shorter ones
# have rows that k = beta = 0 and decay 1 make exact no-ops. The last Cast is for onnx's checker,
# which knows no types of ONNX Runtime's own operations.
_STEP = """
gated_delta_step {attributes} (new_rows, kernel, time_bias, decay, rows, state, start, state_start,
    rows_end{side}) => (y, state_out, rows_out)
{{
    let zero = 0, one = 1, nothing = 0.0, tiny = 1e-6, first = [0], second = [1], third = [2]
    let last = [-1], end = [2147483647], reach = [{reach}], held = [{held}], held_count = {held}
    let most = [{replay}]
{select}
    index_row = Range (zero, held_count, one)
    starts = Unsqueeze ({start}, second)
    ends = Unsqueeze ({rows_end}, second)
    state_starts = Unsqueeze ({state_start}, second)
    shift = Sub (starts, ends)
    shifted = Add (index_row, shift)
    index = Max (shifted, zero)
    oldest = Sub (starts, held)
    places = Add (index_row, oldest)
    index_column = Unsqueeze (index, third)
    gathered = GatherND <batch_dims = 1> ({rows}, index_column)
    is_placed = GreaterOrEqual (places, zero)
    is_row = Unsqueeze (is_placed, third)
    old_rows = Where (is_row, gathered, nothing)
    all_rows = Concat <axis = 1> (old_rows, new_rows)
    total = Shape <start = 1, end = 2> (all_rows)
    count = Sub (total, held)
    {rows_out} = Slice (all_rows, count, total, second)

    pending = Sub (starts, state_starts)
    longest_column = ReduceMax <keepdims = 1> (pending)
    longest = Reshape (longest_column, second)
    dropped = Sub ({room}, longest)
    window = Slice (all_rows, dropped, end, second)
    before, raw_b, raw_a = Split <axis = 2> (window, parts)
    history = Slice (before, first, reach, second)
    mixed = Slice (before, reach, end, second)
    b = Slice (raw_b, reach, end, second)
    a = Slice (raw_a, reach, end, second)
    convolved, history_out = com.microsoft.CausalConvWithState
        <activation = "silu", channels_last = 1> (mixed, kernel, "", history)
    raw_q, raw_k, v = Split <axis = 2> (convolved, kinds)
    any_g, any_beta = com.microsoft.LinearAttentionGate (a, time_bias, decay, b)

    let by_head = [0, 0, {key_heads}, {head_dim}], by_row = [0, 0, {keys}]
    q_heads = Reshape (raw_q, by_head)
    q_squares = ReduceSumSquare <keepdims = 1> (q_heads, last)
    q_sum = Add (q_squares, tiny)
    q_length = Sqrt (q_sum)
    q_unit = Div (q_heads, q_length)
    q = Reshape (q_unit, by_row)
    k_heads = Reshape (raw_k, by_head)
    k_squares = ReduceSumSquare <keepdims = 1> (k_heads, last)
    k_sum = Add (k_squares, tiny)
    k_length = Sqrt (k_sum)
    k_unit = Div (k_heads, k_length)
    any_k = Reshape (k_unit, by_row)

    skipped = Add (dropped, reach)
    replayed = Slice (places, skipped, end, second)
    is_replayed = GreaterOrEqual (replayed, state_starts)
    grid = Shape <start = 0, end = 2> (new_rows)
    is_new = ConstantOfShape <value = bool[1] {{1}}> (grid)
    is_live = Concat <axis = 1> (is_replayed, is_new)
    is_live_row = Unsqueeze (is_live, third)
    k = Where (is_live_row, any_k, nothing)
    g = Where (is_live_row, any_g, nothing)
    beta = Where (is_live_row, any_beta, nothing)

    tail = Min (count, most)
    run = Add (longest, count)
    cut = Sub (run, tail)
{parts}
    is_fresh = Equal ({state_start}, zero)
    let state_grid = [-1, 1, 1, 1]
    is_fresh_state = Reshape (is_fresh, state_grid)
    state_before = Where (is_fresh_state, nothing, state)
    settled_y, {state_out} = com.microsoft.LinearAttention
        <q_num_heads = {key_heads}, kv_num_heads = {value_heads}, update_rule = "gated_delta">
        (settled_q, settled_k, settled_v, state_before, settled_g, settled_beta)
    open_y, state_after = com.microsoft.LinearAttention
        <q_num_heads = {key_heads}, kv_num_heads = {value_heads}, update_rule = "gated_delta">
        (open_q, open_k, open_v, {state_out}, open_g, open_beta)
    new_settled_y = Slice (settled_y, longest, end, second)
    untyped_y = Concat <axis = 1> (new_settled_y, open_y)
    y = Cast <to = 1> (untyped_y){settle}
}}
"""

# An idle sequence runs as a fresh one, of which nothing is kept.
_SELECT = """
    let room = [{room}]
    side_column = Unsqueeze (side, second)
    own_rows = GatherND <batch_dims = 1> (rows, side_column)
    is_idle = Less (rows_end, zero)
    own_start = Where (is_idle, zero, start)
    own_state_start = Where (is_idle, zero, state_start)
    own_rows_end = Where (is_idle, zero, rows_end)
"""
_SETTLE = """
    is_idle_state = Reshape (is_idle, state_grid)
    typed_state = Cast <to = 1> (own_state_out)
    state_out = Where (is_idle_state, state, typed_state)
    let sides = [0, 1]
    is_read = Equal (side_column, sides)
    idle_column = Unsqueeze (is_idle, second)
    is_kept = Or (is_read, idle_column)
    let row_grid = [0, 0, 1, 1]
    is_kept_side = Reshape (is_kept, row_grid)
    own_rows_out_by_side = Unsqueeze (own_rows_out, second)
    rows_out = Where (is_kept_side, rows, own_rows_out_by_side)"""


def kept_rows(form: GraphForm, sizes: RecurrentSizes) -> int:
    """L, the rows that a sequence keeps of a layer: what is replayed, and what those convolve.

    In engines more, until a sequence's rows fill whole `ALIGNED_ELEMENTS`, as TensorRT wants slots.
    """
    assert form.replay is not None, "a form of a model without recurrent state"
    least = form.replay + sizes.kernel - 1
    if not form.is_native:
        return least
    step = ALIGNED_ELEMENTS // math.gcd(ALIGNED_ELEMENTS, sizes.row_elements)
    return -(-least // step) * step


def gated_delta_function(form: GraphForm, sizes: RecurrentSizes) -> onnx.FunctionProto:
    """The layer between its projections and its gated norm, over rows of sequences.

    new_rows [B,S,C+2N]: raw q, k, v, then b and a; kernel [C,1,kernel]; time_bias and decay [N],
    decay = -exp(A_log); rows [B,L,C+2N]; state [B,N,D,D]; start, state_start, rows_end [B]: where
    the call's rows begin, up to where the state has taken rows, and behind which row `rows` end.
    y [B,S,N·D]. Afterwards `state` is that of max(start, start + S - P), and `rows` end at
    start + S. state_start <= start <= rows_end, and rows_end - state_start <= P, or both are 0.

    Engines with kernels have rows [B,2,L,C+2N] and side [B], which of both a call reads; it writes
    the other. They also have an attribute, P, and idle sequences: where rows_end is IDLE, state and
    rows stay as they are, whatever the other inputs.
    """
    replay, held = form.replay, kept_rows(form, sizes)
    keys = sizes.key_heads * sizes.head_dim
    names = ("rows", "start", "state_start", "rows_end", "state_out", "rows_out")
    lines = {name: name for name in names}
    lines |= dict.fromkeys(("attributes", "side", "select", "settle"), "") | {"room": "most"}
    if is_stepped_by_kernel(form, sizes):
        lines = {name: f"own_{name}" for name in names}
        lines |= {"attributes": "<replay>", "side": ", side", "room": "room", "settle": _SETTLE}
        lines["select"] = _SELECT.format(room=held - (sizes.kernel - 1))
    spans = {"settled": "first, cut", "open": "cut, end"}
    parts = [
        f"    {name}_{value} = Slice ({value}, {span}, second)"
        for name, span in spans.items()
        for value in ("q", "k", "v", "g", "beta")
    ]
    text = _STEP.format(
        **lines,
        parts="\n".join(parts),
        reach=sizes.kernel - 1,
        held=held,
        replay=replay,
        keys=keys,
        key_heads=sizes.key_heads,
        value_heads=sizes.value_heads,
        head_dim=sizes.head_dim,
    )
    splits = {
        "parts": [sizes.channels, sizes.value_heads, sizes.value_heads],
        "kinds": [keys, keys, sizes.value_elements],
    }
    constants = {
        name: onnx.helper.make_tensor(name, onnx.TensorProto.INT64, [3], values)
        for name, values in splits.items()
    }
    return define(text, constants, contrib=True)


def is_stepped_by_kernel(form: GraphForm, sizes: RecurrentSizes) -> bool:
    """Whether a kernel of ours runs the recurrence of graphs of `form`."""
    return form.has_kernels and has_recurrent_kernel(sizes.head_dim, sizes.kernel)

"""`dflash::gated_delta_groups`: gated_delta.py's recurrence in standard operations, for engines.

TensorRT has no layer for a recurrence, only loops. Row by row a loop would run hundreds of tiny
kernels a layer, so rows go in groups: within one, products of matrices take the place of a loop
(the UT transform, arXiv 2412.06464), and only the state is handed from group to group. A decode
step is one group. Rows round otherwise than one by one; see docs/design/recurrent-state.md.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import numpy_helper

from dflash_trt.core.arrays import FloatArray
from dflash_trt.graph.form import GraphForm
from dflash_trt.graph.functions import define
from dflash_trt.graph.gated_delta import kept_rows
from dflash_trt.models.sizes import RecurrentSizes

GROUPS = "gated_delta_groups"
SMALLEST_GROUP = 32
"""Rows: smaller groups would make prompts longer loops, and no step cheaper."""

# All rows that may be left to replay run again, whether they are or not, since a shape must not
# depend on values. Rows in front of them fill the first group; those that the state has taken, and
# these, have k = beta = 0 and decay 1. The last group ends with the call, so that what may be taken
# back lies in it. Its rows change no state: `settles` keeps their decay and update out of it.
_GROUPS = """
{name} (new_rows, kernel, time_bias, decay, rows, state, start, state_start, rows_end)
    => (y, state_out, rows_out)
{{
    let zero = 0, one = 1, nothing = 0.0, unit = 1.0, tiny = 1e-6
    scale = Constant <value_float = {scale}> ()
    let first = [0], second = [1], third = [2], last = [-1], end = [2147483647], reach = [{reach}]
    let held = [{held}], held_count = {held}, held_last = {held_last}, most = [{replay}]
    let group = [{group}], group_less = [{group_less}]

    index_row = Range (zero, held_count, one)
    starts = Unsqueeze (start, second)
    ends = Unsqueeze (rows_end, second)
    shift = Sub (starts, ends)
    shifted = Add (index_row, shift)
    above = Max (shifted, zero)
    index = Min (above, held_last)
    oldest = Sub (starts, held)
    old_places = Add (index_row, oldest)
    index_column = Unsqueeze (index, third)
    gathered = GatherND <batch_dims = 1> (rows, index_column)
    is_placed = GreaterOrEqual (old_places, zero)
    is_row = Unsqueeze (is_placed, third)
    old_rows = Where (is_row, gathered, nothing)
    all_rows = Concat <axis = 1> (old_rows, new_rows)
    count = Shape <start = 1, end = 2> (new_rows)
    total = Add (count, held)
    moved_rows = Slice (all_rows, count, total, second)
    wanted_rows = Slice (all_rows, surplus, end, second)

    some = Add (count, most)
    covered = Add (some, group_less)
    groups = Div (covered, group)
    run = Mul (groups, group)
    spare = Sub (run, some)
    let none_after = [0, 0, 0, 0], none_before = [0]
    pads = Concat <axis = 0> (none_before, spare, none_after)
    window = Pad (wanted_rows, pads)
    mixed = Slice (window, first, channels_end, third)
    {taps}
    opened = Sigmoid (convolved)
    activated = Mul (convolved, opened)
    raw_q, raw_k, raw_v = Split <axis = 2> (activated, kinds)
    gates = Slice (window, reach, end, second)
    b = Slice (gates, channels_end, a_begin, third)
    a = Slice (gates, a_begin, end, third)
    any_beta = Sigmoid (b)
    time = Add (a, time_bias)
    time_above = Max (time, nothing)
    time_size = Abs (time)
    time_below = Neg (time_size)
    time_power = Exp (time_below)
    time_sum = Add (time_power, unit)
    time_log = Log (time_sum)
    softplus = Add (time_above, time_log)
    any_g = Mul (softplus, decay)

    places_end = Add (starts, count)
    places_begin = Sub (places_end, run)
    run_scalar = Squeeze (run)
    run_row = Range (zero, run_scalar, one)
    places = Add (run_row, places_begin)
    state_starts = Unsqueeze (state_start, second)
    is_live = GreaterOrEqual (places, state_starts)
    is_live_row = Unsqueeze (is_live, third)
    beta_rows = Where (is_live_row, any_beta, nothing)
    g_rows = Where (is_live_row, any_g, nothing)
    beyond = Sub (count, most)
    settled = Max (beyond, first)
    cut = Add (starts, settled)
    is_settled = Less (places, cut)
    settles_row = Cast <to = 1> (is_settled)

    batch = Shape <start = 0, end = 1> (new_rows)
    live_shape = Concat <axis = 0> (batch, groups, group, ones)
    key_shape = Concat <axis = 0> (batch, groups, group, key_heads)
    value_shape = Concat <axis = 0> (batch, groups, group, value_heads)
    gate_shape = Concat <axis = 0> (batch, groups, group, gate_heads)
    live_flags = Cast <to = 1> (is_live)
    live_groups = Reshape (live_flags, live_shape)
    settles_groups = Reshape (settles_row, live_shape)
    settles = Transpose <perm = [1, 0, 3, 4, 2]> (settles_groups)
    q_groups = Reshape (raw_q, key_shape)
    q_squares = Mul (q_groups, q_groups)
    q_total = ReduceSum <keepdims = 1> (q_squares, last)
    q_sum = Add (q_total, tiny)
    q_length = Sqrt (q_sum)
    q_unit = Div (q_groups, q_length)
    q_scaled = Mul (q_unit, scale)
    q = Transpose <perm = [1, 0, 3, 4, 2, 5]> (q_scaled)
    k_groups = Reshape (raw_k, key_shape)
    k_squares = Mul (k_groups, k_groups)
    k_total = ReduceSum <keepdims = 1> (k_squares, last)
    k_sum = Add (k_total, tiny)
    k_length = Sqrt (k_sum)
    k_unit = Div (k_groups, k_length)
    live_heads = Unsqueeze (live_groups, last)
    k_live = Mul (k_unit, live_heads)
    k = Transpose <perm = [1, 0, 3, 4, 2, 5]> (k_live)
    k_columns = Transpose <perm = [0, 1, 2, 3, 5, 4]> (k)
    v_groups = Reshape (raw_v, value_shape)
    v = Transpose <perm = [1, 0, 3, 4, 2, 5]> (v_groups)
    beta_groups = Reshape (beta_rows, gate_shape)
    beta = Transpose <perm = [1, 0, 3, 4, 2]> (beta_groups)
    g_groups = Reshape (g_rows, gate_shape)
    g = Transpose <perm = [1, 0, 3, 4, 2]> (g_groups)
    beta_column = Unsqueeze (beta, last)

    let before_last = [-2]
    g_row = Unsqueeze (g, before_last)
    g_until = Mul (g_row, until)
    passed = ReduceSum <keepdims = 0> (g_until, last)
    passed_column = Unsqueeze (passed, last)
    passed_row = Unsqueeze (passed, before_last)
    between = Sub (passed_column, passed_row)
    between_live = Min (between, nothing)
    fades = Exp (between_live)
    fade_column = Exp (passed_column)
    g_settled = Mul (g, settles)
    g_whole = ReduceSum <keepdims = 1> (g_settled, last)
    g_rest = Sub (g_whole, passed)
    g_rest_live = Min (g_rest, nothing)
    fade_rest = Exp (g_rest_live)
    fade_settled = Mul (fade_rest, settles)
    fade_settled_row = Unsqueeze (fade_settled, before_last)
    fade_whole = Exp (g_whole)
    fade_state = Unsqueeze (fade_whole, last)

    alike = MatMul (k, k_columns)
    alike_faded = Mul (alike, fades)
    alike_taken = Mul (alike_faded, beta_column)
    {levels}
    k_faded = Mul (k, fade_column)
    k_taken = Mul (k_faded, beta_column)
    from_state = MatMul (solved, k_taken)
    v_taken = Mul (v, beta_column)
    updates = MatMul (solved, v_taken)
    q_faded = Mul (q, fade_column)
    looked = MatMul (q, k_columns)
    looked_faded = Mul (looked, fades)
    looks = Mul (looked_faded, until)
    k_settled = Mul (k_columns, fade_settled_row)

    state_shape = Concat <axis = 0> (batch, state_heads)
    is_fresh = Equal (state_start, zero)
    let state_grid = [-1, 1, 1, 1]
    is_fresh_state = Reshape (is_fresh, state_grid)
    state_before = Where (is_fresh_state, nothing, state)
    state_by_key = Reshape (state_before, state_shape)
    state_after, y_groups = Scan <num_scan_inputs = 6, body = a_group
        (float[{grouped},{head_dim},{head_dim}] s,
         float[{grouped},{group},{head_dim}] w_of,
         float[{grouped},{group},{head_dim}] u_of,
         float[{grouped},{group},{head_dim}] q_of,
         float[{grouped},{group},{group}] looks_of,
         float[{grouped},{head_dim},{group}] k_of,
         float[{grouped},1,1] fade_of)
        => (float[{grouped},{head_dim},{head_dim}] s_after,
            float[{grouped},{group},{head_dim}] y_of)
    {{
        known = MatMul (w_of, s)
        update = Sub (u_of, known)
        from_before = MatMul (q_of, s)
        from_group = MatMul (looks_of, update)
        y_of = Add (from_before, from_group)
        s_faded = Mul (s, fade_of)
        s_added = MatMul (k_of, update)
        s_after = Add (s_faded, s_added)
    }}> (state_by_key, from_state, updates, q_faded, looks, k_settled, fade_state)
    y_rows = Transpose <perm = [1, 0, 4, 2, 3, 5]> (y_groups)
    y_shape = Concat <axis = 0> (batch, run, value_elements)
    y_run = Reshape (y_rows, y_shape)
    new_begin = Sub (run, count)
    y = Slice (y_run, new_begin, run, second)

    is_idle = Less (rows_end, zero)
    is_idle_state = Reshape (is_idle, state_grid)
    let by_value = [0, {value_heads}, {head_dim}, {head_dim}]
    state_moved = Reshape (state_after, by_value)
    state_out = Where (is_idle_state, state, state_moved)
    let row_grid = [-1, 1, 1]
    is_idle_row = Reshape (is_idle, row_grid)
    rows_out = Where (is_idle_row, rows, moved_rows)
}}
"""


def group_rows(replay: int) -> int:
    """Rows of a group, a power of two: it holds a step, and all that may be left to replay."""
    return int(2 ** math.ceil(math.log2(max(SMALLEST_GROUP, 2 * replay))))


def gated_delta_groups_function(form: GraphForm, sizes: RecurrentSizes) -> onnx.FunctionProto:
    """What `gated_delta_function` defines, in standard operations of TensorRT's too.

    Inputs and outputs are its own, with one more case: a sequence whose rows_end is IDLE keeps its
    state and rows, whatever its other inputs.
    """
    replay, held = form.replay, kept_rows(form, sizes)
    assert replay is not None
    group, share = group_rows(replay), sizes.value_heads // sizes.key_heads
    text = _GROUPS.format(
        name=GROUPS,
        scale=1 / math.sqrt(sizes.head_dim),
        reach=sizes.kernel - 1,
        held=held,
        held_last=held - 1,
        replay=replay,
        group=group,
        group_less=group - 1,
        value_heads=sizes.value_heads,
        head_dim=sizes.head_dim,
        grouped=f"B,{sizes.key_heads},{share}",
        taps=_taps(sizes),
        levels=_levels(group),
    )
    keys = sizes.key_heads * sizes.head_dim
    lists = {
        "surplus": [held - replay - (sizes.kernel - 1)],
        "kinds": [keys, keys, sizes.value_elements],
        "channels_end": [sizes.channels],
        "a_begin": [sizes.channels + sizes.value_heads],
        "ones": [1, 1],
        "key_heads": [sizes.key_heads, 1, sizes.head_dim],
        "value_heads": [sizes.key_heads, share, sizes.head_dim],
        "gate_heads": [sizes.key_heads, share],
        "state_heads": [sizes.key_heads, share, sizes.head_dim, sizes.head_dim],
        "value_elements": [sizes.value_elements],
    }
    constants: dict[str, npt.NDArray[Any]] = {
        name: np.array(values, np.int64) for name, values in lists.items()
    }
    constants |= {"until": np.tri(group, dtype=np.float32)} | _level_masks(group)
    return define(
        text, {name: numpy_helper.from_array(one, name) for name, one in constants.items()}
    )


def _taps(sizes: RecurrentSizes) -> str:
    """The causal convolution of `mixed` with `kernel` as a sum of shifted rows: `convolved`."""
    lines, so_far = [], ""
    for tap in range(sizes.kernel):
        result = "convolved" if tap == sizes.kernel - 1 else f"sum_{tap}"
        lines += [
            f"tap_{tap} = Constant <value_ints = [{tap}]> ()",
            f"tap_{tap}_next = Constant <value_ints = [{tap + 1}]> ()",
            f"weight_{tap} = Slice (kernel, tap_{tap}, tap_{tap}_next, third)",
            f"weight_{tap}_flat = Reshape (weight_{tap}, last)",
            f"tap_{tap}_end = Add (run, tap_{tap})",
            f"rows_{tap} = Slice (mixed, tap_{tap}, tap_{tap}_end, second)",
            f"part_{tap} = Mul (rows_{tap}, weight_{tap}_flat)",
            f"{result} = Add ({so_far}, part_{tap})" if so_far else f"{result} = Identity (part_0)",
        ]
        so_far = result
    return "\n    ".join(lines)


def _levels(group: int) -> str:
    """`solved`, the inverse of 1 plus `alike_taken` below its diagonal.

    Inverses of its diagonal blocks give those of blocks twice as large. No power of the matrix
    occurs, which equal keys would let grow beyond what float32 holds.
    """
    lines, before = [], ""
    for level in range(_level_count(group)):
        after = "solved" if level == _level_count(group) - 1 else f"solved_{level}"
        lines.append(f"below_{level} = Mul (alike_taken, level_{level})")
        if before:
            lines.append(f"half_{level} = MatMul (below_{level}, {before})")
            lines.append(f"whole_{level} = MatMul ({before}, half_{level})")
        else:
            before = "diagonal"
            lines.append("whole_0 = Identity (below_0)")
        lines.append(f"{after} = Sub ({before}, whole_{level})")
        before = after
    return "\n    ".join(lines)


def _level_count(group: int) -> int:
    return group.bit_length() - 1


def _level_masks(group: int) -> dict[str, FloatArray]:
    """The diagonal, and for each level the lower left quarters of blocks of 2^(level + 1) rows."""
    rows, columns = np.indices((group, group))
    masks = {"diagonal": rows == columns}
    for level in range(_level_count(group)):
        same_block = rows >> (level + 1) == columns >> (level + 1)
        masks[f"level_{level}"] = same_block & (rows >> level > columns >> level)
    return {name: mask.astype(np.float32) for name, mask in masks.items()}

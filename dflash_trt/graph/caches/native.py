"""Linear caches for TensorRT's own attention, with a place for attention sinks.

A sink is a logit s_h in a head's softmax that no value belongs to. TensorRT's kernels know of none,
so it is one more key with value 0: one more dimension of queries holds s_h, where the sink's key
has 1 and all others 0, which is exact. It stands behind each call's rows until the next.

A cache is updated once in a network, but each step of an EAGLE-3 chain sees the rows of those
before it. These few are attended to apart, and then count as one sink, whose logit is the logarithm
of the sum of their exponentials. Its value has a 1 in a dimension of its own, where attention
leaves the share that they have of the whole. It stands at position 0, where a chain has no row.
"""

from __future__ import annotations

from collections.abc import Sequence

from dflash_trt.graph.bindings import KV
from dflash_trt.graph.caches.cpu import cache_length
from dflash_trt.graph.caches.rows import attend_by_kernel, store_rows
from dflash_trt.graph.form import GraphForm
from dflash_trt.graph.functions import attention_function, define
from dflash_trt.graph.model_builder import LayerBuilder
from dflash_trt.hardware.kernels import HEAD_DIMS
from dflash_trt.models.sizes import LayerSizes

# TensorRT's kernels take head sizes that are multiples of 8.
SINK_DIMS = 8

# What TensorRT-RTX 1.7 has fused attention kernels for; TensorRT's are not known.
FUSED_HEAD_DIMS = range(16, 257, 8)

DECOMPOSED = "decomposed_attention"
"""Attention written out, for heads larger than any fused kernel's: Gemma 4's of 512 elements.

Every position that a cache has room for is read and weighed; the mask takes out the rest."""

# Scores are float32, since one of 60 in bfloat16 may be off by 0.1. A score that is not seen is
# finite: an idle row sees nothing, and would be NaN.
_ATTENTION = """
{name} (q, k, v, mask) => (attended)
{{
    let by_group = [0, {kv_heads}, {groups}, -1, {head_dim}]
    let by_head = [0, {heads}, -1, {head_dim}], third = [2], unseen = -1e30
    groups = Reshape (q, by_group)
    queries = Cast <to = 1> (groups)
    keys = Transpose <perm = [0, 1, 3, 2]> (k)
    wide_keys = Cast <to = 1> (keys)
    key_groups = Unsqueeze (wide_keys, third)
    all_scores = MatMul (queries, key_groups)
    seen = Unsqueeze (mask, third)
    scores = Where (seen, all_scores, unseen)
    wide_shares = Softmax <axis = -1> (scores)
    shares = Cast <to = {narrow}> (wide_shares)
    value_groups = Unsqueeze (v, third)
    grouped = MatMul (shares, value_groups)
    attended = Reshape (grouped, by_head)
}}
"""

_LOGIT_PARTS = 3
"""Numbers that a chain's logit is the sum of: one of the compute type has 8 to 11 bits of it."""


def is_decomposed(layer: LayerSizes, form: GraphForm) -> bool:
    """Whether a layer's attention is written out, since no kernel has heads as large.

    Of causal ones without sinks, whose mask says all: what else a cache has room for lies behind.
    """
    is_large = _is_plain(layer) and layer.is_causal and layer.head_dim > FUSED_HEAD_DIMS[-1]
    return is_large and not is_attended_by_kernel(layer, form)


def is_attended_by_kernel(layer: LayerSizes, form: GraphForm, *, needs_room: bool = False) -> bool:
    """Whether a kernel of ours attends in a layer: it reads what caches hold, and no more.

    None does where a model's linear caches need room for a sink, as a chain's do.
    """
    if form.has_kernel_caches:
        return layer.recurrent is None
    has_kernel = _is_plain(layer) and layer.head_dim in HEAD_DIMS
    return form.has_kernels and has_kernel and not needs_room


def _is_plain(layer: LayerSizes) -> bool:
    return layer.recurrent is None and not layer.has_sinks


def attend_natively(layer: LayerBuilder, q: str, k: str, v: str) -> str:
    """TensorRT's own attention, which is told nothing of sinks, or what takes its place."""
    sizes, form = layer.sizes, layer.b.form
    if sizes.has_sinks:
        return _attend_with_sinks(layer, q, k, v)
    caches = store_rows(layer, k, v)
    if is_attended_by_kernel(sizes, form):
        return attend_by_kernel(layer, q, caches)
    if is_decomposed(sizes, form):
        return _attend_decomposed(layer, q, caches)
    mask = layer.rows.window_mask(sizes.window, sizes.is_causal, lambda: cache_length(layer))
    return _attend_where(layer, q, caches, mask)


def _attend_where(layer: LayerBuilder, q: str, caches: Sequence[str], mask: str) -> str:
    """TensorRT's attention of q over `caches`, of the keys for which the mask is true."""
    operands = [q, *caches, mask]
    return layer.b.call(attention_function("explicit"), operands, "attend", causal_kind="none")[0]


def sink_rows(layer: LayerBuilder, k: str, v: str) -> list[str]:
    """K and V of a chain's rows, `SINK_DIMS` dimensions wider; that of position 0 is the sink."""
    b, head_dim = layer.b, layer.sizes.head_dim
    is_sink = b.node("Equal", [layer.rows.positions, b.integers(0, scalar=True)], "at_sink")
    is_sink = b.node("Unsqueeze", [is_sink, b.integers(1, 3)], "is_sink")
    stored = []
    for kind, rows, ones in zip(KV, (k, v), (_LOGIT_PARTS, 1), strict=True):
        row = [0.0] * head_dim + [1.0] * ones + [0.0] * (SINK_DIMS - ones)
        sink = b.constant(f"chain.{kind}.{head_dim}", [1, 1, 1, len(row)], row)
        wide = _widen_rows(layer, rows, kind)
        stored.append(b.node("Where", [is_sink, sink, wide], f"{kind}_or_sink"))
    return stored


def held_mask(layer: LayerBuilder) -> str:
    """bool [B,1,2,M]: what a chain's caches hold before the call, twice; an idle sequence may hold
    nothing, and attends to its sink."""
    b, zero, one = layer.b, *(layer.b.integers(value, scalar=True) for value in (0, 1))
    length = b.node("Squeeze", [cache_length(layer)], "cache_length_scalar")
    keys = b.node("Range", [zero, length, one], "chain_keys")
    held = b.node("Max", [layer.rows.start, one], "rows_held")
    held = b.node("Unsqueeze", [held, b.integers(1, 2, 3)], "rows_held_columns")
    mask = b.node("Less", [keys, held], "held")
    return b.node("Concat", [mask, mask], "held_twice", axis=2)


def attend_with_rows(layer: LayerBuilder, q: str, k: str, v: str, mask: str) -> str:
    """Attention [B,heads,1,D] of one query q [B,heads,1,D] over the rows of a chain's caches that
    `held_mask` names, and over k, v [B,kv heads,n,D] beside them."""
    b, sizes = layer.b, layer.sizes
    groups = b.integers(0, sizes.kv_heads, sizes.heads // sizes.kv_heads, sizes.head_dim)
    # A score of 60 in bfloat16 may be 0.1 too high, its exponential a tenth.
    queries = b.widen(b.node("Reshape", [q, groups], "q_groups"), "q_groups_wide")
    keys = b.widen(b.node("Transpose", [k], "own_keys", perm=[0, 1, 3, 2]), "own_keys_wide")
    scores = b.node("MatMul", [queries, keys], "own_scores")
    axis = b.integers(3)
    top = b.node("ReduceMax", [scores, axis], "own_top")
    powers = b.node("Exp", [b.node("Sub", [scores, top], "below_top")], "own_powers")
    total = b.node("ReduceSum", [powers, axis], "own_total")
    weights = b.narrow(b.node("Div", [powers, total], "own_shares"), "own_weights")
    own = b.node("MatMul", [weights, v], "own_groups")
    own = b.node("Reshape", [own, b.integers(0, sizes.heads, 1, sizes.head_dim)], "own_values")
    logit = b.node("Add", [top, b.node("Log", [total], "own_log")], "own_logit")
    logit = b.node("Reshape", [logit, b.integers(0, sizes.heads, 1, 1)], "sink_logit")
    attended = _attend_to_held(layer, q, logit, mask)
    axes, size = b.integers(2, 3), sizes.head_dim
    bounds = [b.integers(0, 0), b.integers(1, size)]
    held = b.node("Slice", [attended, *bounds, axes], "held_values")
    bounds = [b.integers(0, size), b.integers(1, size + 1)]
    share = b.node("Slice", [attended, *bounds, axes], "own_share")
    return b.node("Add", [held, b.node("Mul", [share, own], "own_part")], "attended")


def _attend_to_held(layer: LayerBuilder, q: str, logit: str, mask: str) -> str:
    """q [B,heads,1,D] over the caches' rows in the mask, the sink's logit float32 [B,heads,1,1]:
    [B,heads,2,D + SINK_DIMS], twice the same row."""
    b, parts, rest = layer.b, [q], logit
    for part in range(_LOGIT_PARTS):
        if part:
            wide = b.widen(parts[-1], f"logit_{part - 1}_wide")
            rest = b.node("Sub", [rest, wide], f"logit_{part}_rest")
        parts.append(b.narrow(rest, f"logit_{part}"))
    wide = b.node("Concat", parts, "q_with_logit", axis=3)
    padding = b.integers(0, 0, 0, 0, 0, 0, 0, SINK_DIMS - _LOGIT_PARTS)
    wide = b.node("Pad", [wide, padding], "q_wide")
    # TensorRT-RTX 1.7 has no kernel for one row of few heads, or over a long cache.
    wide = b.node("Concat", [wide, wide], "q_twice", axis=2)
    return _attend_where(layer, wide, layer.caches, mask)


def _widen_rows(layer: LayerBuilder, rows: str, kv: str) -> str:
    """K or V rows [B,H,S,D] with `SINK_DIMS` more dimensions."""
    padding = layer.b.integers(0, 0, 0, 0, 0, 0, 0, SINK_DIMS)
    return layer.b.node("Pad", [rows, padding], f"{kv}_wide")


def _attend_with_sinks(layer: LayerBuilder, q: str, k: str, v: str) -> str:
    b, sizes, rows = layer.b, layer.sizes, layer.rows
    q = _widen_queries(layer, q)
    k, v = _append_sink(layer, k, "k"), _append_sink(layer, v, "v")
    caches = store_rows(layer, k, v)
    mask = rows.window_mask(
        sizes.window, sizes.is_causal, lambda: cache_length(layer), with_sink=True
    )
    attended = _attend_where(layer, q, caches, mask)
    cut = [b.integers(value) for value in (0, sizes.head_dim, 3)]
    return b.node("Slice", [attended, *cut], "without_sink")


def _widen_queries(layer: LayerBuilder, q: str) -> str:
    """q [B,H,S,D] with `SINK_DIMS` more dimensions, the first of which holds the sinks."""
    b = layer.b
    by_head = b.node("Reshape", [layer.weight("sinks"), b.integers(1, -1, 1, 1)], "sink_heads")
    padding = b.integers(0, 0, 0, 0, 0, 0, 0, SINK_DIMS - 1)
    by_head = b.node("Pad", [by_head, padding], "sink_dimensions")
    heads = b.node("Shape", [q], "query_heads", start=0, end=3)
    shape = b.node("Concat", [heads, b.integers(SINK_DIMS)], "sink_shape", axis=0)
    columns = b.node("Expand", [by_head, shape], "sink_columns")
    return b.node("Concat", [q, columns], "q_with_sink", axis=3)


def _append_sink(layer: LayerBuilder, rows: str, kv: str) -> str:
    """K or V rows [B,H,S,D] with `SINK_DIMS` more dimensions and the sink as one more row."""
    b, head_dim = layer.b, layer.sizes.head_dim
    wide = _widen_rows(layer, rows, kv)
    row = [0.0] * (head_dim + SINK_DIMS)
    row[head_dim] = float(kv == "k")
    stored = b.constant(f"sink.{kv}.{head_dim}", [1, 1, 1, len(row)], row)
    sizes = [layer.rows.batch, b.integers(layer.sizes.kv_heads, 1, len(row))]
    shape = b.node("Concat", sizes, f"{kv}_sink_shape", axis=0)
    sink = b.node("Expand", [stored, shape], f"{kv}_sink")
    return b.node("Concat", [wide, sink], f"{kv}_with_sink", axis=2)


def _attend_decomposed(layer: LayerBuilder, q: str, caches: list[str]) -> str:
    """Attention of q [B,heads,S,D], pre-scaled, over caches; a model has one kind of such heads."""
    sizes = layer.sizes
    mask = layer.rows.window_mask(sizes.window, sizes.is_causal, lambda: cache_length(layer))
    heads, kv_heads, head_dim = sizes.heads, sizes.kv_heads, sizes.head_dim
    text = _ATTENTION.format(
        name=DECOMPOSED,
        heads=heads,
        kv_heads=kv_heads,
        groups=heads // kv_heads,
        head_dim=head_dim,
        narrow=int(layer.b.form.precision.onnx_type),
    )
    function = define(text, overload=f"{heads}_{kv_heads}_{head_dim}")
    return layer.b.call(function, [q, *caches, mask], "attend")[0]

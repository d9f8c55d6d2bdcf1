"""The pieces that the target and the draft share: norms, linears, attention, MLP.

Activations between layers are rows [T,H] (T = B·S), so that every linear is one Gemm over
the checkpoint's own [out, in] weights; only attention needs [B,heads,S,D].
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import onnx
from onnx import TensorProto

from dflash_trt.checkpoints.quantized_weights import linear_algorithm
from dflash_trt.graph.bindings import PAGE_TABLE, Owner, cache_input
from dflash_trt.graph.block_attention import block_attention_function
from dflash_trt.graph.decoder import Decoder
from dflash_trt.graph.form import Precision
from dflash_trt.graph.functions import (
    AttentionOverload,
    attention_facts,
    attention_function,
    swiglu_function,
)
from dflash_trt.graph.kv_caches import kv_scales, update_caches
from dflash_trt.graph.model import GraphBuilder
from dflash_trt.graph.paged import paged_attention_function
from dflash_trt.graph.quantized import quantized_product
from dflash_trt.graph.sinks import append_sink, sink_attention_function, widen_queries
from dflash_trt.graph.tables import RopeTables


@dataclass(slots=True)
class Rows:
    """Where the rows of a call stand; computed once per graph.

    ids [B,S]; start [B]; positions [B,S] int64; lengths [B] int32 = start + S.
    """

    builder: GraphBuilder
    ids: str
    start: str
    batch: str = field(init=False)
    count: str = field(init=False)
    positions: str = field(init=False)
    lengths: str = field(init=False)
    _shapes: dict[tuple[int, ...], str] = field(init=False, default_factory=dict)
    _masks: dict[tuple[int | None, bool, bool], str] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        b = self.builder
        with b.scope("rows"):
            zero, one = b.integers(0, scalar=True), b.integers(1, scalar=True)
            self.batch = b.node("Shape", [self.ids], "batch", start=0, end=1)
            self.count = b.node("Shape", [self.ids], "count", start=1, end=2)
            count = b.node("Squeeze", [self.count], "count_scalar")
            row = b.node("Range", [zero, count, one], "index")
            start = b.node("Unsqueeze", [self.start, b.integers(1)], "start_column")
            self.positions = b.node("Add", [start, row], "positions")
            ends = b.node("Add", [self.start, self.count], "ends")
            self.lengths = b.node("Cast", [ends], "kv_lengths", to=TensorProto.INT32)

    def shape(self, *trailing: int) -> str:
        """The shape value [B, S, *trailing]."""
        if trailing not in self._shapes:
            b = self.builder
            name = "rows/shape_" + "x".join(str(size) for size in trailing)
            self._shapes[trailing] = b.node(
                "Concat", [self.batch, self.count, b.integers(*trailing)], name, axis=0
            )
        return self._shapes[trailing]

    def sink_lengths(self) -> str:
        """int32 [B]: keys in a cache whose last row is a sink's."""
        b = self.builder
        one = b.node("Cast", [b.integers(1)], "rows/one", to=TensorProto.INT32)
        return b.node("Add", [self.lengths, one], "rows/kv_lengths_with_sink")

    def window_mask(
        self, window: int | None, causal: bool, cache: str, *, with_sink: bool = False
    ) -> str:
        """bool [B,1,S,M]: a query at position p may see key j where |p - j| < window.

        Causality has to be part of the mask: TensorRT refuses a mask beside a causal kind. None
        is no window. `with_sink` adds the key behind the call's rows, which every query sees.
        """
        if (window, causal, with_sink) not in self._masks:
            b = self.builder
            label = f"window_{window}" if window is not None else "all"
            label += "_causal" * causal + "_sink" * with_sink
            with b.scope(label):
                zero, one = b.integers(0, scalar=True), b.integers(1, scalar=True)
                if b.form.page_size is None:
                    length = b.node("Shape", [cache], "cache_length", start=2, end=3)
                else:
                    length = b.node("Shape", [PAGE_TABLE], "columns", start=1, end=2)
                    length = b.node("Mul", [length, b.integers(b.form.page_size)], "cache_length")
                length = b.node("Squeeze", [length], "cache_length_scalar")
                keys = b.node("Range", [zero, length, one], "keys")
                queries = b.node("Unsqueeze", [self.positions, b.integers(1, 3)], "queries")
                offset = b.node("Sub", [queries, keys], "offset")
                mask = ""
                if window is not None:
                    distance = b.node("Abs", [offset], "distance")
                    mask = b.node("Less", [distance, b.integers(window, scalar=True)], "near")
                if causal:
                    past = b.node("GreaterOrEqual", [offset, zero], "past")
                    mask = b.node("And", [mask, past], "near_past") if mask else past
                if with_sink:
                    ends = b.node("Add", [self.start, self.count], "sink_position")
                    ends = b.node("Unsqueeze", [ends, b.integers(1, 2, 3)], "sink_positions")
                    sink = b.node("Equal", [keys, ends], "sink")
                    mask = b.node("Or", [mask, sink], "near_past_or_sink")
                self._masks[window, causal, with_sink] = mask
        return self._masks[window, causal, with_sink]


def rms_norm(
    b: GraphBuilder,
    x: str,
    owner: Owner,
    spec: Decoder,
    role: str,
    name: str,
    *,
    is_wide: bool = False,
) -> str:
    """RMSNorm over the last axis, Zhang & Sennrich 2019 (arXiv 1910.07467).

    Computed in float32 whatever the compute type, which the result has; `is_wide` says that x
    is float32 already.
    """
    scale = weight(b, owner, spec, role, Precision.FLOAT32)
    wide = x if is_wide else b.widen(x, f"{name}_input")
    inner = name if b.form.precision is Precision.FLOAT32 else f"{name}_float32"
    normed = b.node("RMSNormalization", [wide, scale], inner, axis=-1, epsilon=spec.rms_norm_eps)
    return b.narrow(normed, name)


def weight(
    b: GraphBuilder, owner: Owner, spec: Decoder, role: str, precision: Precision | None = None
) -> str:
    """A weight of `owner` in `precision` (the compute type), called `owner/role`."""
    return b.weight(f"{owner}/{role}", spec.weights[role], precision)


def linear(
    b: GraphBuilder,
    x: str,
    owner: Owner,
    spec: Decoder,
    role: str,
    name: str,
    *,
    residual: str | None = None,
    precision: Precision | None = None,
) -> str:
    """x [T,in] @ W[out,in]^T, plus the layer's bias or a residual [T,out] where there is one.

    x and the residual are in `precision` (the compute type). How W is stored decides the
    product: a quantised linear rounds x as well (see graph/quantized.py).
    """
    b.observe(x, f"{owner}/{role}")
    bias = f"{role}.bias"
    algorithm = linear_algorithm(spec.weights, role)
    if algorithm is not None:
        result = quantized_product(
            b, x, f"{owner}/{role}", spec.weights, role, algorithm, name, precision
        )
        if bias in spec.weights:
            shift = weight(b, owner, spec, bias, precision)
            result = b.node("Add", [result, shift], f"{name}_bias")
        return result if residual is None else b.node("Add", [result, residual], f"{name}_add")
    operands = [x, weight(b, owner, spec, role, precision)]
    if bias in spec.weights:
        operands.append(weight(b, owner, spec, bias, precision))
        result = b.node("Gemm", operands, name, transB=1)
        return result if residual is None else b.node("Add", [result, residual], f"{name}_add")
    if residual is not None:
        operands.append(residual)
    return b.node("Gemm", operands, name, transB=1)


def swiglu_mlp(b: GraphBuilder, x: str, owner: Owner, spec: Decoder, layer: int) -> str:
    """x [T,H] + down(silu(gate(n)) * up(n)) of n = post_attention_layernorm(x)."""
    prefix = f"layers.{layer}"
    with b.scope("mlp"):
        normed = rms_norm(b, x, owner, spec, f"{prefix}.post_attention_layernorm", "norm")
        gate = linear(b, normed, owner, spec, f"{prefix}.gate_proj", "gate_proj")
        up = linear(b, normed, owner, spec, f"{prefix}.up_proj", "up_proj")
        (activated,) = b.call(swiglu_function(), [gate, up], "swiglu")
        return linear(b, activated, owner, spec, f"{prefix}.down_proj", "down_proj", residual=x)


def attention(
    b: GraphBuilder,
    x: str,
    owner: Owner,
    spec: Decoder,
    layer: int,
    rows: Rows,
    tables: RopeTables,
    *,
    causal: bool,
    window: int | None,
) -> str:
    """x [T,H] + o_proj(attention(input_layernorm(x))), writing the rows' K and V into the cache.

    The rows are written first and attended to through the cache, so that one kernel sees
    context and block alike.
    """
    prefix = f"layers.{layer}"
    kv_heads, head_dim = spec.num_kv_heads, spec.head_dim
    with b.scope("attention"):
        normed = rms_norm(b, x, owner, spec, f"{prefix}.input_layernorm", "norm")
        q = _heads(b, normed, owner, spec, layer, "q", spec.num_heads, rows)
        k = _heads(b, normed, owner, spec, layer, "k", kv_heads, rows)
        v = _heads(b, normed, owner, spec, layer, "v", kv_heads, rows)
        # The query tables carry 1/sqrt(D), so that no node has to scale q.
        q = b.node(
            "RotaryEmbedding", [q, tables.q_cos(b), tables.q_sin(b), rows.positions], "q_rope"
        )
        k = b.node("RotaryEmbedding", [k, tables.cos(b), tables.sin(b), rows.positions], "k_rope")
        if b.form.has_kernel_caches:
            caches = update_caches(b, owner, spec, layer, (k, v), rows.start, rows.positions)
            attended = _attend_by_kernel(
                b, owner, spec, layer, [q, *caches, rows.lengths], causal=causal, window=window
            )
            return _project(b, attended, x, owner, spec, layer)
        sinks = f"{prefix}.sinks" in spec.weights
        is_narrow = b.form.precision is not Precision.FLOAT32
        if sinks and is_narrow:
            q = widen_queries(b, q, weight(b, owner, spec, f"{prefix}.sinks"))
            k = append_sink(b, k, "k", rows.batch, head_dim, kv_heads)
            v = append_sink(b, v, "v", rows.batch, head_dim, kv_heads)
        k_cache, v_cache = update_caches(b, owner, spec, layer, (k, v), rows.start, rows.positions)
        overload: AttentionOverload = "lower_right" if causal else "none"
        causal_kind, mask, lengths = overload, "", rows.lengths
        if window is not None or sinks:
            overload, causal_kind = "masked", "none"
            cache = cache_input(owner, "k", layer)
            mask = rows.window_mask(window, causal, cache, with_sink=sinks and is_narrow)
        if sinks and not is_narrow:
            operands = [q, k_cache, v_cache, mask, weight(b, owner, spec, f"{prefix}.sinks")]
            attended = _attend(b, sink_attention_function(head_dim), operands, kv_heads)
        else:
            if sinks:
                lengths = b.once("kv_lengths_with_sink", rows.sink_lengths)
            operands = [q, k_cache, v_cache, mask, "", lengths]
            function = attention_function(overload)
            facts = None
            if is_narrow and not sinks:
                facts = attention_facts(spec.num_heads, head_dim, causal=causal, window=window)
            attended = _attend(
                b, function, operands, kv_heads, facts=facts, causal_kind=causal_kind
            )
            if sinks:
                cut = [b.integers(0), b.integers(head_dim), b.integers(3)]
                attended = b.node("Slice", [attended, *cut], "without_sink")
        return _project(b, attended, x, owner, spec, layer)


def _project(
    b: GraphBuilder, attended: str, x: str, owner: Owner, spec: Decoder, layer: int
) -> str:
    """x [T,H] + o_proj(attended [B,heads,S,D])."""
    merged = b.node("Transpose", [attended], "by_row", perm=[0, 2, 1, 3])
    width = spec.num_heads * spec.head_dim
    flat = b.node("Reshape", [merged, b.integers(-1, width)], "rows")
    return linear(b, flat, owner, spec, f"layers.{layer}.o_proj", "o_proj", residual=x)


def _attend_by_kernel(
    b: GraphBuilder,
    owner: Owner,
    spec: Decoder,
    layer: int,
    operands: list[str],
    *,
    causal: bool,
    window: int | None,
) -> str:
    """Calls block_attention: q, the two caches and the lengths, and what else its form takes."""
    operands = [*operands, *[PAGE_TABLE] * b.form.is_paged]
    if b.form.is_fp8:
        operands.append(kv_scales(b, owner, spec, layer))
    role, heads = f"layers.{layer}.sinks", spec.num_heads
    if role in spec.weights:
        operands.append(weight(b, owner, spec, role, Precision.FLOAT32))
    else:
        none = [-math.inf] * heads
        operands.append(b.constant(f"no_sinks_{heads}", [heads], none, Precision.FLOAT32))
    function = block_attention_function(b.form)
    return b.call(function, operands, "attend", is_causal=int(causal), window=window or 0)[0]


def _attend(
    b: GraphBuilder,
    function: onnx.FunctionProto,
    operands: list[str],
    kv_heads: int,
    **attributes: Any,
) -> str:
    """Calls an attention function over the caches, or its paged form over pools."""
    if b.form.page_size is not None:
        function, operands = paged_attention_function(function), [*operands, PAGE_TABLE]
        attributes |= {"page_size": b.form.page_size, "kv_heads": kv_heads}
    (attended,) = b.call(function, operands, "attend", **attributes)
    return attended


def _heads(
    b: GraphBuilder,
    x: str,
    owner: Owner,
    spec: Decoder,
    layer: int,
    kind: str,
    heads: int,
    rows: Rows,
) -> str:
    """Projects rows [T,H] to [B,heads,S,D], with the per-head norm where the layer has one."""
    role = f"layers.{layer}.{kind}_proj"
    projected = linear(b, x, owner, spec, role, f"{kind}_proj")
    split = b.node("Reshape", [projected, rows.shape(heads, spec.head_dim)], f"{kind}_split")
    norm_role = f"layers.{layer}.{kind}_norm"
    if norm_role in spec.weights:
        split = rms_norm(b, split, owner, spec, norm_role, f"{kind}_norm")
    return b.node("Transpose", [split], f"{kind}_heads", perm=[0, 2, 1, 3])

"""The target's graphs: `target.onnx` (verifies and injects) and `target_only.onnx` (baseline)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import onnx
from onnx import TensorProto

from dflash_trt.graph import bindings as io
from dflash_trt.graph.bindings import GraphName
from dflash_trt.graph.caches.rows import cache_values, paging
from dflash_trt.graph.call_rows import Rows
from dflash_trt.graph.drawing import draw_tokens, settle_step
from dflash_trt.graph.eagle import inject_context
from dflash_trt.graph.form import CPU_FORM, GraphForm, Precision
from dflash_trt.graph.kv_cache_update import kv_feature_injection_function
from dflash_trt.graph.layers import attention, embed, gated_delta, gated_mlp, lm_head
from dflash_trt.graph.model import GraphBuilder
from dflash_trt.graph.model_builder import ModelBuilder
from dflash_trt.graph.moe import mixture_mlp
from dflash_trt.graph.rope_tables import RopeTables, draft_tables, still_columns
from dflash_trt.graph.tensors import cache_layout, declare, graph_tensors
from dflash_trt.models.draft import DraftSpec
from dflash_trt.models.safetensors_header import TensorEntry
from dflash_trt.models.target import TargetSpec

LAYER_SCALAR = "layer_scalar"


def build_target(
    target: TargetSpec,
    draft: DraftSpec | None,
    tables: Mapping[str, TensorEntry],
    locate: Callable[[TensorEntry], str],
    form: GraphForm = CPU_FORM,
) -> onnx.ModelProto:
    """Builds `target.onnx`, or `target_only.onnx` without a draft; tensors.py has their tensors.

    Every row's tapped features become the draft's context at the row's own position. Rows past
    the accepted prefix are overwritten before anything reads them.
    """
    name: GraphName = "target_only" if draft is None else "target"
    b = GraphBuilder(name, locate, form, tables)
    layout = cache_layout(form, target.sizes, None if draft is None else draft.sizes)
    declare(b, graph_tensors(name, form, layout, target.vocab_size))
    rows = Rows(b, io.TOKEN_IDS, io.CACHE_START)
    ropes = RopeTables("target", tables, target.query_scale, still_columns(target))
    model = ModelBuilder(b, "target", target, rows, ropes)
    x = embedded = embed(model)
    taps: dict[int, str] = {}
    for index in range(target.num_layers):
        layer = model.layer(index)
        with b.scope(f"layers.{index}"):
            x = attention(layer, x) if layer.sizes.recurrent is None else gated_delta(layer, x)
            x = gated_mlp(layer, x) if target.moe is None else mixture_mlp(layer, x, target.moe)
            if layer.has(LAYER_SCALAR):
                x = b.node("Mul", [x, layer.weight(LAYER_SCALAR)], "scaled")
        taps[index] = x

    with b.scope("head"):
        normed = model.rms_norm(_pick_rows(b, x, rows), "norm", "norm")
        flat_logits = lm_head(model, normed)
        shape = b.node("Shape", [io.LOGIT_ROWS], "logit_shape")
        shape = b.node("Concat", [shape, b.integers(target.vocab_size)], "logits_shape", axis=0)
        logits = _write_logits(b, flat_logits, shape)
        if not form.draws:
            _write_choices(b, logits, target.vocab_size)
        else:
            draw_tokens(b, logits)
            if draft is not None:
                settle_step(b, draft.mask_token_id)

    if draft is not None:
        if draft.norms_last_tap and index in draft.target_layer_ids:
            taps[index] = model.rms_norm(x, "norm", "injection/last_tap")
        features = [taps[layer] for layer in draft.target_layer_ids]
        rope = RopeTables(draft_tables(target, draft), tables)
        head = ModelBuilder(b, "draft", draft, rows, rope)
        if draft.traits.is_chain:
            inject_context(head, features, embedded, carries_norm=draft.carries_norm)
        else:
            _inject_features(head, features)
    return b.finish()


def _inject_features(draft: ModelBuilder, taps: list[str]) -> None:
    """Projects the tapped features, [T,H] each, into every draft layer's K and V caches."""
    b, rows, tables = draft.b, draft.rows, draft.tables
    with b.scope("injection"):
        tapped = b.node("Concat", taps, "taps", axis=1) if len(taps) > 1 else taps[0]
        # Single channels of a target's hidden state reach 2e4, whose sums overflow float16.
        tapped = b.widen(tapped, "fc_input")
        feature = draft.linear(tapped, "fc", precision=Precision.FLOAT32)
        feature = draft.rms_norm(feature, "hidden_norm", "hidden_norm", is_wide=True)
        layers = [draft.layer(index) for index in range(draft.spec.num_layers)]
        shapes = [rows.shape(layer.sizes.kv_heads, layer.sizes.head_dim) for layer in layers]
        function = kv_feature_injection_function(b.form)
        for layer, shape in zip(layers, shapes, strict=True):
            with b.scope(f"draft_layers.{layer.index}"):
                k, v = layer.linear(feature, "k_proj"), layer.linear(feature, "v_proj")
                k = b.node("Reshape", [k, shape], "k_split")
                v = b.node("Reshape", [v, shape], "v_split")
                norm = layer.weight("k_norm", Precision.FLOAT32)
                caches, updated = cache_values(layer)
                operands = [k, v, norm, *tables.keys(b), rows.positions, *caches]
                facts = {"epsilon": draft.spec.rms_norm_eps, **paging(layer)}
                b.call(function, operands, "inject", outputs=updated, **facts)


def _write_logits(b: GraphBuilder, flat_logits: str, shape: str) -> str:
    """Logits [B·R,V] to the output, float32 [B,R,V]; returns them in the compute type."""
    if b.form.precision is Precision.FLOAT32:
        return b.node("Reshape", [flat_logits, shape], "logits", output=io.LOGITS)
    logits = b.node("Reshape", [flat_logits, shape], "narrow_logits")
    b.node("Cast", [logits], "logits", output=io.LOGITS, to=TensorProto.FLOAT)
    return logits


def _write_choices(b: GraphBuilder, logits: str, vocab_size: int) -> None:
    """Of logits [B,R,V], the argmax [B,R] and the candidates."""
    b.node("ArgMax", [logits], "choice", output=io.CHOICE_IDS, axis=2, keepdims=0)
    if b.form.has_candidates:
        kept = b.integers(min(io.CANDIDATES, vocab_size))
        values = b.top_k(logits, kept, "candidates", indices=io.CANDIDATE_IDS)
        b.node("Cast", [values], "candidates", output=io.CANDIDATE_LOGITS, to=TensorProto.FLOAT)


def _pick_rows(b: GraphBuilder, x: str, rows: Rows) -> str:
    """The rows of x [T,H] at logit_rows [B,R], whose logits are wanted: [B·R,H]."""
    zero, one = b.integers(0, scalar=True), b.integers(1, scalar=True)
    batch = b.node("Squeeze", [rows.batch], "batch_scalar")
    sequence = b.node("Range", [zero, batch, one], "sequence")
    first = b.node("Mul", [sequence, rows.count], "first_row")
    first = b.node("Unsqueeze", [first, b.integers(1)], "first_row_column")
    flat = b.node("Add", [first, io.LOGIT_ROWS], "flat_rows")
    flat = b.node("Reshape", [flat, b.integers(-1)], "flat_index")
    return b.node("Gather", [x, flat], "picked", axis=0)

"""EAGLE-3 (arXiv 2503.01840): a head's context inside the target's graph, and its chain of drafts.

Row j of a head takes the token at position j and the target's feature of position j - 1, so it has
all that it needs as soon as the target has seen position j. Its K and V lie in the draft's caches
at j, beside a cache of the features themselves: the next call begins with the last one's. A page
then depends on its own tokens and those before, as the target's does. Row 0 has no feature and is
never attended to. As published, row j turns by position j - 1; attention sees differences only.
"""

from __future__ import annotations

from onnx import TensorProto

from dflash_trt.graph.bindings import PAGE_TABLE
from dflash_trt.graph.caches import cache_strategy
from dflash_trt.graph.caches.strategy import store_rows
from dflash_trt.graph.form import Precision
from dflash_trt.graph.layers import split_heads
from dflash_trt.graph.model_builder import LayerBuilder, ModelBuilder


def inject_context(
    head: ModelBuilder, taps: list[str], embedded: str, *, carries_norm: bool
) -> None:
    """Writes a call's rows into the head's caches, from its taps and embeddings, [T,H] each."""
    b, rows, width = head.b, head.rows, head.spec.hidden_size
    with b.scope("injection"):
        tapped = b.node("Concat", taps, "taps", axis=1) if len(taps) > 1 else taps[0]
        # Single channels of a target's hidden state reach 2e4, whose sums overflow float16.
        tapped = b.widen(tapped, "fc_input")
        fused = head.linear(tapped, "fc", precision=Precision.FLOAT32)
        fused = b.node("Reshape", [b.narrow(fused, "features"), rows.shape(width)], "feature_rows")
        bounds = [b.integers(0), b.integers(-1), b.integers(1)]
        earlier = b.node("Slice", [fused, *bounds], "earlier_features")
        first = b.node("Unsqueeze", [feature_before(head), b.integers(1)], "first_feature")
        moved = b.node("Concat", [first, earlier], "moved_features", axis=1)
        moved = b.node("Reshape", [moved, b.integers(-1, width)], "moved_rows")
        layer = head.layer(0)
        with b.scope("draft_layers.0"):
            x, _ = layer_input(layer, embedded, moved, carries_norm=carries_norm)
            k, v = keys_and_values(layer, x)
            store_rows(layer, *cache_strategy(b.form).chain_rows(layer, k, v))
        store_features(head, fused)


def feature_before(head: ModelBuilder) -> str:
    """The features [B,H] of the position before the call's first; of a first call, anything."""
    b, start = head.b, head.rows.start
    with b.scope("feature_before"):
        zero, one = b.integers(0, scalar=True), b.integers(1, scalar=True)
        position = b.node("Sub", [start, one], "unbounded")
        position = b.node("Max", [position, zero], "position")
        caches = head.layer(1).caches
        if b.form.page_size is None:
            length = b.node("Shape", caches[:1], "length", start=2, end=3)
            batch = b.node("Squeeze", [head.rows.batch], "batch")
            sequence = b.node("Range", [zero, batch, one], "sequence")
            first = b.node("Mul", [sequence, length], "first")
        else:
            size = b.integers(b.form.page_size, scalar=True)
            column = b.node("Div", [position, size], "column")
            column = b.node("Unsqueeze", [column, b.integers(1)], "columns")
            page = b.node("GatherElements", [PAGE_TABLE, column], "page", axis=1)
            page = b.node("Cast", [page], "page_number", to=TensorProto.INT64)
            page = b.node("Squeeze", [page, b.integers(1)], "page_of")
            first = b.node("Mul", [page, size], "first")
            position = b.node("Mod", [position, size], "place")
        row = b.node("Add", [first, position], "row")
        width = b.integers(-1, head.spec.hidden_size // 2)
        halves = []
        for kind, cache in zip("kv", caches, strict=True):
            flat = b.node("Reshape", [cache, width], f"{kind}_rows")
            halves.append(b.node("Gather", [flat, row], f"{kind}_half", axis=0))
        return b.node("Concat", halves, "feature", axis=1)


def store_features(head: ModelBuilder, features: str) -> None:
    """Writes features [B,S,H] at the rows of the call, as they are: a rounded one would make a
    call's first row depend on where the prompt's chunks end."""
    b, axis = head.b, head.b.integers(2)
    with b.scope("features"):
        halves = []
        for at in range(2):
            half = head.spec.hidden_size // 2
            bounds = [b.integers(at * half), b.integers((at + 1) * half), axis]
            part = b.node("Slice", [features, *bounds], f"half_{at}")
            halves.append(b.node("Unsqueeze", [part, b.integers(1)], f"rows_{at}"))
        store_rows(head.layer(1), halves[0], halves[1], is_exact=True)


def layer_input(
    layer: LayerBuilder, embedded: str, feature: str, *, carries_norm: bool
) -> tuple[str, str]:
    """What q, k and v are made of [T,2H], and what the layer adds to [T,H]."""
    b = layer.b
    token = layer.rms_norm(embedded, "input_layernorm", "token_norm")
    normed = layer.rms_norm(feature, "hidden_norm", "feature_norm")
    both = b.node("Concat", [token, normed], "token_and_feature", axis=1)
    return both, normed if carries_norm else feature


def keys_and_values(layer: LayerBuilder, x: str) -> tuple[str, str]:
    """K, turned by its position, and V [B,kv heads,S,D] of rows x [T,2H]."""
    b, heads = layer.b, layer.sizes.kv_heads
    k, v = split_heads(layer, x, "k", heads), split_heads(layer, x, "v", heads)
    operands = [k, *layer.tables.keys(b), layer.rows.positions]
    return b.node("RotaryEmbedding", operands, "k_rope"), v

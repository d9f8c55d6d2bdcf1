"""EAGLE-3 (arXiv 2503.01840): a head's context inside the target's graph, and its chain of drafts.

Row j of a head takes the token at position j and the target's feature of position j - 1, so it has
all that it needs as soon as the target has seen position j. Its K and V lie in the draft's caches
at j, beside a cache of the features themselves: the next call begins with the last one's. A page
then depends on its own tokens and those before, as the target's does. Row 0 has no feature and is
never attended to. As published, row j turns by position j - 1; attention sees differences only.

The chain has as many steps of one token as a call has drafts. A step reads the caches and the rows
of the steps before it, which are small and carried along; so no cache is copied. On the CPU it is
a loop, and a call with fewer drafts costs less. In an engine it is unrolled: fewer drafts are the
first of all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from onnx import TensorProto

from dflash_trt.graph.bindings import BLOCK_IDS, PAGE_TABLE
from dflash_trt.graph.caches import store_chain
from dflash_trt.graph.caches.cpu import linear_view
from dflash_trt.graph.caches.native import attend_with_rows, held_mask
from dflash_trt.graph.caches.rows import store_rows
from dflash_trt.graph.call_rows import Rows
from dflash_trt.graph.form import Precision
from dflash_trt.graph.layers import (
    embed,
    gated_mlp,
    lm_head,
    open_gate,
    split_gated,
    split_heads,
    turn_keys,
    turn_queries,
)
from dflash_trt.graph.model_builder import LayerBuilder, ModelBuilder
from dflash_trt.graph.moe import mixture_mlp
from dflash_trt.graph.rope_tables import HEAD_TOKENS
from dflash_trt.models.draft import DraftSpec
from dflash_trt.models.eagle import FC_NORM, INPUT_NORM
from dflash_trt.models.moe import MoeSpec
from dflash_trt.models.mtp import OUTPUT_NORM, TOKEN_NORM
from dflash_trt.models.safetensors_header import TensorEntry

STEPS = "chain/steps"
"""Name of the loop, where the chain is one."""
_HIDDEN = -1e30
"""A score that no softmax sees."""

Attend = Callable[[LayerBuilder, str, str, str], str]
"""Attention of one query q [B,heads,1,D] over the context, then k and v [B,kv heads,n,D]: of
every head D values, in their order."""


def inject_context(
    head: ModelBuilder, taps: list[str], embedded: str, *, carries_norm: bool
) -> None:
    """Writes a call's rows into the head's caches, from its taps and embeddings, [T,H] each."""
    b, rows, width = head.b, head.rows, head.spec.hidden_size
    with b.scope("injection"):
        embedded = embed(head) if head.has("embed_tokens") else embedded
        feature = taps[0] if head.has(OUTPUT_NORM) else _fuse(head, taps)
        fused = b.node("Reshape", [feature, rows.shape(width)], "feature_rows")
        bounds = [b.integers(0), b.integers(-1), b.integers(1)]
        earlier = b.node("Slice", [fused, *bounds], "earlier_features")
        first = b.node("Unsqueeze", [feature_before(head), b.integers(1)], "first_feature")
        moved = b.node("Concat", [first, earlier], "moved_features", axis=1)
        moved = b.node("Reshape", [moved, b.integers(-1, width)], "moved_rows")
        layer = head.layer(0)
        with b.scope("draft_layers.0"):
            x, _ = layer_input(head, embedded, moved, carries_norm=carries_norm)
            k, v = keys_and_values(layer, x)
            store_chain(layer, k, v)
        store_features(head, fused)


def _fuse(head: ModelBuilder, taps: list[str]) -> str:
    """What a head makes of its taps [T,H] each: a feature [T,H]."""
    b = head.b
    if head.has(FC_NORM.format(0)):
        roles = (FC_NORM.format(at) for at in range(len(taps)))
        taps = [head.rms_norm(tap, role, role) for tap, role in zip(taps, roles, strict=True)]
    tapped = b.node("Concat", taps, "taps", axis=1) if len(taps) > 1 else taps[0]
    if head.has(INPUT_NORM):
        tapped = head.rms_norm(tapped, INPUT_NORM, INPUT_NORM)
    # Single channels of a target's hidden state reach 2e4, whose sums overflow float16.
    tapped = b.widen(tapped, "fc_input")
    return b.narrow(head.linear(tapped, "fc", precision=Precision.FLOAT32), "features")


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
    model: ModelBuilder, embedded: str, feature: str, *, carries_norm: bool
) -> tuple[str, str]:
    """What q, k and v are made of [T,2H], and what the layer adds to [T,H].

    Of an MTP layer both are [T,H]: it fuses the two rows before its layer.
    """
    b, layer = model.b, model.layer(0)
    if model.has(OUTPUT_NORM):
        token = model.rms_norm(embedded, TOKEN_NORM, "token_norm")
        output = model.rms_norm(feature, OUTPUT_NORM, "feature_norm")
        both = b.node("Concat", [token, output], "token_and_output", axis=1)
        x = model.linear(both, "fc")
        return layer.rms_norm(x, "input_layernorm", "input_norm"), x
    token = layer.rms_norm(embedded, "input_layernorm", "token_norm")
    normed = layer.rms_norm(feature, "hidden_norm", "feature_norm")
    both = b.node("Concat", [token, normed], "token_and_feature", axis=1)
    return both, normed if carries_norm else feature


def keys_and_values(layer: LayerBuilder, x: str) -> tuple[str, str]:
    """K, turned by its position, and V [B,kv heads,S,D] of rows x [T,n]."""
    heads = layer.sizes.kv_heads
    k, v = split_heads(layer, x, "k", heads), split_heads(layer, x, "v", heads)
    return turn_keys(layer, k), v


@dataclass(frozen=True, slots=True)
class EagleChain:
    """The chain of `draft`, in the graph of `base`, whose rows are those that draft.

    `target` is who embeds tokens; `stored` holds the head's vocabulary where it has its own.
    """

    base: ModelBuilder
    target: ModelBuilder
    draft: DraftSpec
    stored: Mapping[str, TensorEntry]

    def drafts(self) -> str:
        """Adds the chain behind the call's anchors; returns its tokens [B,S-1].

        What its own rows and features write to the caches is scratch, as any draft's is.
        """
        b, sizes = self.base.b, self.draft.sizes.layer
        zero, one = b.integers(0), b.integers(1)
        with b.scope("chain"):
            anchors = b.node("Slice", [BLOCK_IDS, zero, one, one], "anchors")
            anchors = b.node("Reshape", [anchors, b.integers(-1)], "anchor")
            feature = feature_before(self.base)
            none = [self.base.rows.batch, b.integers(sizes.kv_heads, 0, sizes.head_dim)]
            shape = b.node("Concat", none, "no_rows_shape", axis=0)
            nothing = b.constant("eagle.nothing", [1, 1, 0, 1], [])
            nothing = b.node("Expand", [nothing, shape], "no_rows")
            state = [anchors, feature, nothing, nothing]
            for role in sorted(self.draft.weights):  # cast once, not at every step
                if ".experts." not in role and not b.int8(self.base.name(role)):
                    self.base.weight(role)
            head = "lm_head" if self.target.has("lm_head") else "embed_tokens"
            if not self.base.has("lm_head") and not b.int8(self.target.name(head)):
                self.target.weight(head)
            if b.form.precision is Precision.FLOAT32:
                attend = self._attention()
                rows = ("B", sizes.kv_heads, "rows", sizes.head_dim)
                kinds = [(7, ("B",)), (1, ("B", self.draft.hidden_size)), (1, rows), (1, rows)]
                carried = [(value, *kind) for value, kind in zip(state, kinds, strict=True)]
                # A turn for each slot of one sequence: loops are bounded by a tensor's size.
                slots = b.node("Gather", [self.base.rows.ids, zero], "slots", axis=0)
                trips = b.node("Size", [slots], "trips")
                *state, every = b.loop("steps", trips, carried, partial(self._step, attend))
                tokens = b.node("Transpose", [every], "tokens", perm=[1, 0])
                k, v = state[2:]
            else:
                tokens, k, v = self._unrolled(state)
            store_chain(self.base.layer(0), k, v)
            shape = self.base.rows.shape(self.draft.hidden_size)
            wide = b.node("Unsqueeze", [feature, one], "feature_row")
            store_features(self.base, b.node("Expand", [wide, shape], "scratch"))
        return tokens

    def _unrolled(self, state: list[str]) -> tuple[str, str, str]:
        """The tokens [B,n] of a call's n drafts, and their rows; all steps run in every call."""
        b, rows = self.base.b, self.base.rows
        zero, one = b.integers(0), b.integers(1)
        last = b.node("Sub", [rows.count, one], "last_step")
        attend = partial(attend_with_rows, mask=held_mask(self.base.layer(0)))
        chosen: list[str] = []
        for slot in range(self.draft.block_size - 1):
            with b.scope(f"step_{slot}"):
                # At the context's end, steps that no draft is of would have no position.
                number = b.node("Min", [b.integers(slot), last], "number")
                state = self._step(attend, number, state)
                chosen.append(b.node("Unsqueeze", [state[0], one], "column"))
        every = b.node("Concat", chosen, "every_token", axis=1)
        tokens, k, v = (
            b.node("Slice", [value, zero, rows.count, b.integers(axis)], name)
            for name, value, axis in (("tokens", every, 1), ("k", state[2], 2), ("v", state[3], 2))
        )
        return tokens, k, v

    def _attention(self) -> Attend:
        """That of the CPU: over linear K and V [B,kv heads,M,D], and what is added to their
        scores [B,1,M,1]."""
        b, rows, layer = self.base.b, self.base.rows, self.base.layer(0)
        k, v = linear_view(layer)
        zero, one = b.integers(0, scalar=True), b.integers(1, scalar=True)
        length = b.node("Squeeze", [b.node("Shape", [k], "length", start=2, end=3)], "keys_count")
        keys = b.node("Range", [zero, length, one], "keys")
        start = b.node("Unsqueeze", [rows.start, b.integers(1)], "starts")
        held = b.node("Less", [keys, start], "held")
        has_feature = b.node("Greater", [keys, zero], "has_feature")
        seen = b.node("And", [held, has_feature], "seen")
        shown = b.constant("eagle.shown", [1], [0.0])
        hidden = b.constant("eagle.hidden", [1], [_HIDDEN])
        around = b.integers(1, 3)
        bias = b.node("Where", [seen, shown, hidden], "bias")
        bias = b.node("Unsqueeze", [bias, around], "score_bias")
        if b.form.is_paged:
            # Rows not written yet may be an earlier owner's NaN, and 0 · NaN is NaN.
            held = b.node("Unsqueeze", [seen, around], "rows_held")
            k, v = (
                b.node("Where", [held, one, shown], f"{one.rpartition('/')[2]}_held")
                for one in (k, v)
            )
        return partial(_attend_on_cpu, context=(k, v, bias))

    def _step(self, attend: Attend, number: str, state: list[str]) -> list[str]:
        """One token [B] behind the last: `state` is that, its feature [B,H], and K and V so far."""
        b, spec = self.base.b, self.draft
        token, feature, k_before, v_before = state
        ids = b.node("Unsqueeze", [token, b.integers(1)], "ids")
        start = b.node("Add", [self.base.rows.start, number], "start")
        rows = Rows(b, ids, start, label="/".join([*b.scopes, "rows"]))
        target = ModelBuilder(b, "target", self.target.spec, rows, self.target.tables)
        model = ModelBuilder(b, "draft", spec, rows, self.base.tables)
        layer = model.layer(0)
        embedded = embed(model if model.has("embed_tokens") else target)
        x, carried = layer_input(model, embedded, feature, carries_norm=spec.carries_norm)
        gate = None
        if layer.sizes.has_gate:
            q, gate = split_gated(layer, x)
        else:
            q = split_heads(layer, x, "q", layer.sizes.heads)
        q = turn_queries(layer, q)
        k, v = keys_and_values(layer, x)
        k = b.node("Concat", [k_before, k], "k_so_far", axis=2)
        v = b.node("Concat", [v_before, v], "v_so_far", axis=2)
        attended = attend(layer, q, k, v)
        width = layer.sizes.heads * layer.sizes.head_dim
        attended = b.node("Reshape", [attended, b.integers(-1, width)], "rows_out")
        if gate is not None:
            attended = open_gate(layer, attended, gate)
        feature = layer.linear(attended, "o_proj", residual=carried)
        moe = spec.sizes.experts
        assert moe is None or isinstance(moe, MoeSpec)
        feature = gated_mlp(layer, feature) if moe is None else mixture_mlp(layer, feature, moe)
        normed = model.rms_norm(feature, "norm", "norm")
        has_head = model.has("lm_head")
        logits = model.linear(normed, "lm_head") if has_head else lm_head(target, normed)
        choice = b.node("ArgMax", [logits], "choice", axis=1, keepdims=0)
        if HEAD_TOKENS in self.stored:
            ids = b.stored(HEAD_TOKENS, self.stored[HEAD_TOKENS])
            choice = b.node("Gather", [ids, choice], "target_token", axis=0)
        return [choice, normed if spec.hands_normed else feature, k, v]


def _attend_on_cpu(
    layer: LayerBuilder, q: str, k: str, v: str, context: tuple[str, str, str]
) -> str:
    """See `Attend`: a query's heads are columns, those of one KV head beside each other.

    Keys are the rows of a product, so that nothing as long as the context is transposed.
    """
    b, sizes = layer.b, layer.sizes
    held_k, held_v, bias = context
    by_group = b.integers(0, sizes.kv_heads, sizes.heads // sizes.kv_heads, sizes.head_dim)
    q = b.node("Reshape", [q, by_group], "q_groups")
    q = b.node("Transpose", [q], "q_columns", perm=[0, 1, 3, 2])
    held = b.node("MatMul", [held_k, q], "held_scores")
    held = b.node("Add", [held, bias], "held_seen")
    own = b.node("MatMul", [k, q], "own_scores")
    scores = b.node("Concat", [held, own], "scores", axis=2)
    scores = b.node("Transpose", [scores], "scores_by_query", perm=[0, 1, 3, 2])
    weights = b.node("Softmax", [scores], "wide_weights", axis=3)
    end = b.node("Shape", [held_k], "context_end", start=2, end=3)
    axis = b.integers(3)
    held = b.node("Slice", [weights, b.integers(0), end, axis], "held_weights")
    own = b.node("Slice", [weights, end, b.integers(2**31 - 1), axis], "own_weights")
    held = b.node("MatMul", [held, held_v], "held_values")
    own = b.node("MatMul", [own, v], "own_values")
    return b.node("Add", [held, own], "attended")

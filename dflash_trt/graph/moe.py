"""A mixture of experts as one local function, `dflash::moe`, with a body for each executor.

x [T,H] to [T,H]: a router chooses k of E experts for each row, and the row's result is the sum of
their outputs weighted by the router's shares. Of equal logits the lower expert comes first. How
the bodies keep a row's bits free of its neighbours: docs/design/graphs.md.
"""

from __future__ import annotations

import onnx

from dflash_trt.graph.expert_weights import ExpertWeights, expert_weights
from dflash_trt.graph.form import Precision
from dflash_trt.graph.functions import define, swiglu_function
from dflash_trt.graph.layers import activated
from dflash_trt.graph.model_builder import LayerBuilder
from dflash_trt.models.moe import MoeSpec

MOE = "moe"

_FUNCTION = """
moe ({inputs}) => (y)
{{
{constants}
    logits = Gemm <transB = 1> ({routed})
{route}
{combine}
}}
"""
_ROUTE = {
    "chosen": """
    chosen_logits, ids = TopK (logits, count)
    shares = Softmax <axis = -1> (chosen_logits)""",
    "all": """
    all_shares = Softmax <axis = -1> (logits)
    shares, ids = TopK (all_shares, count)""",
    "normalized": """
    all_shares = Softmax <axis = -1> (logits)
    chosen_shares, ids = TopK (all_shares, count)
    chosen_sum = ReduceSum <keepdims = 1> (chosen_shares, axis_1)
    shares = Div (chosen_shares, chosen_sum)""",
}

_SPLIT = """
sides = Reshape (biased, pairs)
gate = Gather <axis = {axis}> (sides, first)
up = Gather <axis = {axis}> (sides, second)
"""

# What an expert gives a row, whatever its share.
_SCALED = """
    chosen_scales = Gather <axis = 0> (expert_scales, ids)
    scaled_shares = Mul (shares, chosen_scales)"""

# gate, up [.., I] of one expert to its hidden values.
_SWIGLU = """
sigmoid = Sigmoid (gate)
silu = Mul (gate, sigmoid)
hidden = Mul (silu, up)
"""
_GEGLU = """
gelu = Gelu <approximate = "tanh"> (gate)
hidden = Mul (gelu, up)
"""
_CLAMPED_SWIGLU = """
gate_low = Min (gate, limit)
up_low = Min (up, limit)
up_clipped = Max (up_low, minus_limit)
gained = Mul (gate_low, gain)
sigmoid = Sigmoid (gained)
glu = Mul (gate_low, sigmoid)
up_one = Add (up_clipped, one)
hidden = Mul (up_one, glu)
"""

# Rows `rows` [m] chose expert `e`; `shares` [T,k] are what they give it.
_LOOP_COMBINE = """
    flat_ids = Reshape (ids, flat)
    used = Unique <sorted = 1> (flat_ids)
    used_count = Size (used)
    shape = Shape (x)
    nothing = ConstantOfShape (shape)
    y = Loop <body = expert (int64 i, bool go, float[T,H] sum) => (bool go_on, float[T,H] sum_on) {{
        e = Gather <axis = 0> (used, i)
        is_mine = Equal (ids, e)
        found = NonZero (is_mine)
        hits = Transpose <perm = [1, 0]> (found)
        share = GatherND ({shares}, hits)
        rows = Gather <axis = 0> (found, first)
        mine = Gather <axis = 0> (x, rows)
        alone = Unsqueeze (mine, axes_1_2)
{weights}
        wide = MatMul (alone, w_in)
        both = Reshape (wide, columns)
{gate_up_bias}
{split}
{activation}
        hidden_alone = Unsqueeze (hidden, axes_1_2)
        narrow = MatMul (hidden_alone, w_out)
        last = Reshape (narrow, columns)
{down_bias}
        share_column = Unsqueeze (share, axis_1)
        weighted = Mul (result, share_column)
        row_column = Unsqueeze (rows, axis_1)
        sum_on = ScatterND <reduction = "add"> (sum, row_column, weighted)
        go_on = Identity (go)
    }}> (used_count, "", nothing)"""

_GATHER_COMBINE = """
    alone = Unsqueeze (x, axes_1_2)
{weights}
    wide = MatMul (alone, w_in)
    both = Squeeze (wide, axis_2)
{gate_up_bias}
{split}
{activation}
    hidden_alone = Unsqueeze (hidden, axis_2)
    narrow = MatMul (hidden_alone, w_out)
    last = Squeeze (narrow, axis_2)
{down_bias}
    share_rows = Unsqueeze ({shares}, axis_1)
    mixed = MatMul (share_rows, result)
    y = Squeeze (mixed, axis_1)"""


def mixture_mlp(layer: LayerBuilder, x: str, moe: MoeSpec) -> str:
    """x [T,H] plus what the layer's mixture of experts makes of its norm."""
    if layer.has("experts_norm"):
        return _mixture_beside_mlp(layer, x, moe)
    b = layer.b
    with b.scope("mlp"):
        normed = layer.rms_norm(x, "post_attention_layernorm", "norm")
        mixed = _mix(layer, moe, {"x": normed, "router": layer.weight("router")})
        if moe.shared:
            mixed = b.node("Add", [mixed, _shared_expert(layer, normed)], "with_shared")
        return b.node("Add", [x, mixed], "residual")


def _mixture_beside_mlp(layer: LayerBuilder, x: str, moe: MoeSpec) -> str:
    """x [T,H] plus the norm of what MLP and experts give, each with norms of its own: Gemma 4's.

    The router reads x too, by a norm without weights, times a scale for each element.
    """
    b = layer.b
    with b.scope("mlp"):
        normed = layer.rms_norm(x, "post_attention_layernorm", "norm")
        dense = layer.linear(activated(layer, normed), "down_proj")
        dense = layer.rms_norm(dense, "mlp_norm", "mlp_norm")
        normed = layer.rms_norm(x, "experts_norm", "experts_norm")
        routed = layer.rms_norm(x, "router_scale", "router_norm")
        root = b.constant("router_root", [], [layer.spec.hidden_size**-0.5])
        inputs = {
            "x": normed,
            "routed": b.node("Mul", [routed, root], "routed"),
            "router": layer.weight("router"),
            "expert_scales": layer.weight("expert_scales"),
        }
        mixed = layer.rms_norm(_mix(layer, moe, inputs), "experts_output_norm", "experts_out")
        both = b.node("Add", [dense, mixed], "both")
        both = layer.rms_norm(both, "mlp_output_norm", "mlp_output_norm")
        return b.node("Add", [x, both], "residual")


def _mix(layer: LayerBuilder, moe: MoeSpec, inputs: dict[str, str]) -> str:
    """What the experts make of `inputs`, by their names in the function."""
    if layer.has("router.bias"):
        inputs["router_bias"] = layer.weight("router.bias")
    stored = expert_weights(layer, moe)
    inputs |= stored.inputs
    for name in ("gate_up", "down"):
        if layer.has(f"experts.{name}.bias"):
            inputs[f"{name}_bias"] = layer.weight(f"experts.{name}.bias")
    is_gelu = layer.spec.activation == "gelu_tanh"
    precision, loops = layer.b.form.precision, layer.b.may_loop
    function = _function(moe, precision, list(inputs), stored, is_gelu=is_gelu, loops=loops)
    return layer.b.call(function, list(inputs.values()), MOE)[0]


def _shared_expert(layer: LayerBuilder, x: str) -> str:
    """What the expert that all rows share makes of x [T,H], times the sigmoid of its gate."""
    b = layer.b
    gate, up = (layer.linear(x, f"shared_expert.{name}_proj") for name in ("gate", "up"))
    (hidden,) = b.call(swiglu_function(), [gate, up], "shared_swiglu")
    result = layer.linear(hidden, "shared_expert.down_proj")
    # Over whole rows: in a tensor of single numbers, whether ONNX Runtime's Sigmoid takes one in
    # its vectors or behind them depends on how many rows there are, and so may its last bit.
    wide = b.node("Expand", [layer.linear(x, "shared_gate"), b.node("Shape", [x], "shape")], "wide")
    return b.node("Mul", [result, b.node("Sigmoid", [wide], "open")], "shared")


def _function(
    moe: MoeSpec,
    precision: Precision,
    names: list[str],
    stored: ExpertWeights,
    *,
    is_gelu: bool,
    loops: bool,
) -> onnx.FunctionProto:
    is_scaled = "expert_scales" in names

    def add_bias(bias: str, value: str, result: str) -> str:
        if bias not in names:
            return f"{result} = Identity ({value})"
        shift = f"{bias}_shift = Gather <axis = 0> ({bias}, {'e' if loops else 'ids'})"
        return f"{shift}\n    {result} = Add ({value}, {bias}_shift)"

    activation = _GEGLU if is_gelu else _SWIGLU
    axis = 1 + (not loops) + stored.is_interleaved
    combine = (_LOOP_COMBINE if loops else _GATHER_COMBINE).format(
        weights=stored.body,
        gate_up_bias=add_bias("gate_up_bias", "both", "biased"),
        split=_SPLIT.format(axis=axis),
        activation=activation if moe.clamp is None else _CLAMPED_SWIGLU,
        shares="scaled_shares" if is_scaled else "shares",
        down_bias=add_bias("down_bias", "last", "result"),
    )
    routing = "normalized" if moe.routing == "all" and moe.is_normalized else moe.routing
    read = ("routed" if "routed" in names else "x", "router", "router_bias")
    text = _FUNCTION.format(
        inputs=", ".join(names),
        constants=_constants(moe, precision, stored, loops=loops),
        routed=", ".join(name for name in read if name in names),
        route=_ROUTE[routing] + _SCALED * is_scaled,
        combine=combine,
    )
    overload = "chosen_experts" if loops else "gathered_experts"
    return define(text, stored.tables, overload=overload)


def _constants(moe: MoeSpec, precision: Precision, stored: ExpertWeights, *, loops: bool) -> str:
    """Every list of integers and every number that the body reads by name."""
    rest = () if loops else (0,)
    lists: dict[str, tuple[int, ...]]
    lists = {"count": (moe.chosen,), "flat": (-1,), "columns": (0, -1), "axis_1": (1,)}
    lists |= {"axis_2": (2,), "axes_1_2": (1, 2)}
    lists["pairs"] = (0, *rest, -1, 2) if stored.is_interleaved else (0, *rest, 2, -1)
    lines = [f"let {name} = {list(one)}" for name, one in {**lists, **stored.constants}.items()]
    lines.append("let first = 0, second = 1")
    if moe.clamp is not None:
        limit, gain = moe.clamp.limit, moe.clamp.gain
        numbers = {"limit": limit, "minus_limit": -limit, "gain": gain, "one": 1.0}
        for name, number in numbers.items():
            lines.append(f"let {name}_float = {number!r}")
            lines.append(f"{name} = Cast <to = {precision.onnx_type}> ({name}_float)")
    return "\n".join(lines)

"""The draft's attention, native by masks and by plugins, which read lengths: they are the same.

ONNX Runtime runs a float16 draft graph with every native attention's inputs and result as outputs;
the plugins in its place are interpreted over those inputs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest
from dflash_plugins.block_attention.attention_inputs import expect
from dflash_plugins.block_attention.cases import AttentionShape
from dflash_plugins.block_attention.reference import BODY, error_bound
from dflash_plugins.operation import DType
from dflash_plugins.table import operations
from dflash_plugins.testing.numeric import Array
from onnx import TensorProto, helper

from dflash_trt.backends.kernel_calls import hand_over, hand_over_attention
from dflash_trt.backends.onnxruntime.session import open_session
from dflash_trt.graph.form import GraphForm, Precision
from tests.graph.runner import build
from tests.pairs import PairFactory, TinyPair
from tests.plugins.interpreter import Interpreter, assert_close

BLOCK, BATCH = 8, 2
LAYERS = ["full_attention", "sliding_attention", "full_attention"]


def make(make_pair: PairFactory, head_dim: int, **dflash: Any) -> TinyPair:
    heads = {"heads": 4, "kv_heads": 2, "head_dim": head_dim}
    layers = {"num_layers": 3, "layer_types": LAYERS, "sliding_window": 5}
    target = {"head_dim": head_dim, "max_positions": 1024}
    return make_pair("qwen3", target, heads | layers, dflash=dflash, max_seq_len=1024)


def handed_over(model: onnx.ModelProto, capacity: int) -> onnx.ModelProto:
    handed = hand_over(model, set(operations()))
    hand_over_attention(handed, BLOCK, capacity)
    return handed


def plugins(handed: onnx.ModelProto) -> list[onnx.NodeProto]:
    return [node for node in handed.graph.node if node.op_type.startswith("block_attention")]


def attentions(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    return [node for node in model.graph.node if node.op_type == "TRT_Attention"]


def run_graph(built: TinyPair, model: onnx.ModelProto, starts: list[int]) -> dict[str, Array]:
    """Every attention's inputs and result, over random caches."""
    calls = attentions(model)
    known = {value.name for value in model.graph.output}
    kinds = {one: TensorProto.FLOAT16 for node in calls for one in (*node.input, *node.output)}
    kinds |= {node.input[3]: TensorProto.BOOL for node in calls}
    for name in kinds.keys() - known:
        model.graph.output.append(helper.make_tensor_value_info(name, kinds[name], None))
    path = built.bundle.folder / "observed.onnx"  # external data lies beside it
    path.write_bytes(model.SerializeToString())
    session = open_session(path, 1)
    generator = np.random.default_rng(1)
    feeds: dict[str, Array] = {
        "block_ids": generator.integers(0, 60, (len(starts), BLOCK)),
        "cache_start": np.array(starts, np.int64),
    }
    for value in session.get_inputs()[2:]:
        shape = (len(starts), *value.shape[1:])
        feeds[value.name] = generator.standard_normal(shape).astype(np.float16)
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, session.run(None, feeds), strict=True))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("capacity", [192, 1024])
def test_plugins_compute_what_the_drafts_graph_says(
    make_pair: PairFactory, interpreter: Interpreter, capacity: int, causal: bool
) -> None:
    """A layer with a window is causal unless the draft's config says otherwise."""
    built = make(make_pair, 64, **({} if causal else {"causal": False}))
    form, starts = GraphForm(Precision.FLOAT16, cache_length=capacity), [3, capacity - BLOCK]
    model = build(built, "draft", form)
    handed = handed_over(build(built, "draft", replace(form, draws=True)), capacity)
    values = run_graph(built, model, starts)
    want = {node.output[0]: values.pop(node.output[0]) for node in attentions(model)}
    (sinks,) = [one for one in handed.graph.initializer if one.name.startswith("no_sinks")]
    assert len(want) == len(LAYERS)
    values[sinks.name] = onnx.numpy_helper.to_array(sinks)
    lengths = np.array(starts, np.int32) + BLOCK
    known: dict[str, Array] = {}
    for node in plugins(handed):
        operation = operations()[node.op_type]
        attributes = {one.name: helper.get_attribute_value(one) for one in node.attribute}
        inputs = {
            name: lengths if name == "key_value_lengths" else values[source]
            for name, source in zip(operation.inputs, node.input, strict=True)
        }
        own = {name: attributes[name] for name in operation.attributes}
        outputs = interpreter.run(node.op_type, inputs, own)
        values |= dict(zip(node.output, outputs.values(), strict=True))
        known |= inputs
        (name,) = node.output[:1]
        if name in want:
            shape = AttentionShape(4, 2, 64, capacity, compute=DType.FLOAT16)
            masks = {"is_causal": bool(own["is_causal"]), "window": int(own["window"])}
            check(replace(shape, **masks), known, values[name], want.pop(name))
    assert not want


def check(shape: AttentionShape, known: dict[str, Array], plugin: Array, graph: Array) -> None:
    """Both results of one attention, of all that was `known` for it."""
    names = ("q", "k_cache", "v_cache", "key_value_lengths", "sinks")
    inputs = {name: known[name] for name in names}
    expected = expect(shape, inputs)
    assert_close(plugin, expected, error_bound(shape, inputs, expected))
    assert_close(graph, expected, error_bound(shape, inputs, expected, BODY))


def test_a_head_size_without_kernels_stays_native(make_pair: PairFactory) -> None:
    built = make(make_pair, 32)
    model = build(built, "draft", GraphForm(Precision.BFLOAT16, cache_length=192, draws=True))
    handed = handed_over(model, 192)
    assert not plugins(handed)
    assert handed == hand_over(model, set(operations()))

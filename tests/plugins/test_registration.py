"""Registration and launch as TensorRT would ask for them, up to the PTX it would embed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import onnx
import pytest
from dflash_plugins.block_attention.cases import AttentionShape, make_cases
from dflash_plugins.operation import Case, DType, TensorSpec
from dflash_plugins.ptx import entry_parameters
from dflash_plugins.registration import PluginRegistration
from dflash_plugins.table import main_cases, operations

from dflash_trt.backends.tensorrt.build.plugins import plugin_name
from dflash_trt.errors import DflashError
from dflash_trt.graph.block_attention import block_attention_function
from dflash_trt.graph.form import CacheDtype, GraphForm
from dflash_trt.graph.kv_cache_update import kv_cache_update_function
from dflash_trt.graph.kv_feature_injection import kv_feature_injection_function
from tests.standins.plugin import DataType, FakePlugin, TensorDesc

ARCH = "sm_90a"
KERNEL_FORMS = [
    GraphForm(cache_dtype=CacheDtype.FP8),
    GraphForm(page_size=16),
    GraphForm(page_size=16, cache_dtype=CacheDtype.FP8),
]
"""Whose every attention and cache write is a kernel's."""
BIGGER = 3
"""Extents that change between calls are this many times as large when the engine runs."""

# Axes that the graphs leave to each call, by tensor; every other extent is fixed in an engine.
DYNAMIC = {
    "k": (0, 1),
    "v": (0, 1),
    "positions": (0, 1),
    "page_table": (0, 1),
    "logits": (0, 1),
    "sampling": (0,),
    "token_ids": (0, 1),
    "choice_ids": (0, 1),
    "cache_start": (0,),
    "q": (0, 2),
    "k_cache": (0,),
    "v_cache": (0,),
    "key_value_lengths": (0,),
    "shares": (0, 2),
    "log_sums": (0, 2),
}
DYNAMIC_IN = {("kv_cache_update", "k"): (0, 2), ("kv_cache_update", "v"): (0, 2)}
"""Where an operation has its rows elsewhere: by the first part of its kernel's path."""


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> FakePlugin:
    """Of all operations, registered twice: what is known is kept, and nothing is compiled yet."""
    module, folder = FakePlugin(), tmp_path_factory.mktemp("kernels")
    registration = PluginRegistration(SimpleNamespace(DataType=DataType), module, ARCH, folder)
    registration.register()
    registration.register()
    assert list(module.plugins) == [one.plugin_id for one in operations().values()]
    assert not list(folder.iterdir())
    return module


def describe(case: Case) -> tuple[list[TensorDesc], dict[int, tuple[int, ...]]]:
    """The inputs as TensorRT describes them when it builds, and their shapes in a later call."""
    tensors, shapes = [], {}
    for index, name in enumerate(case.operation.inputs):
        spec = case.inputs[name]
        axes = DYNAMIC_IN.get((case.operation.kernel, name), DYNAMIC.get(name, ()))
        known = tuple(-1 if axis in axes else size for axis, size in enumerate(spec.shape))
        tensors.append(TensorDesc(DataType[spec.dtype.tensorrt_name], known, index))
        shapes[index] = tuple(
            size * BIGGER if axis in axes else size for axis, size in enumerate(spec.shape)
        )
    return tensors, shapes


def one_case_of_each() -> list[Case]:
    cases = {case.operation.name: case for case in main_cases()}
    assert set(cases) == set(operations())
    return list(cases.values())


def short_splits() -> list[Case]:
    """Caches of so few positions that they have less than the most shares."""
    shape = AttentionShape(64, 8, 64, 2048, is_causal=True)
    split, merge = make_cases("2,048 positions", shape, batch=8)
    paged, _ = make_cases("2,048 positions", replace(shape, page_size=32), batch=8)
    return [split, paged, merge]


@pytest.mark.parametrize(
    "case",
    [*one_case_of_each(), *short_splits()],
    ids=lambda case: f"{case.operation.name}, {case.name}",
)
def test_tensorrt_is_told_shapes_types_aliases_and_launch(plugin: FakePlugin, case: Case) -> None:
    operation = case.operation
    registered = plugin.plugins[operation.plugin_id]
    assert registered.tensors == list(operation.inputs)
    assert registered.attributes == dict(operation.attributes)
    tensors, shapes = describe(case)
    untold = [tensor.when_types_are_asked() for tensor in tensors]
    types = [output.dtype for output in registered.describe(*untold, **case.attributes)]
    unshaped = [tensor.when_shapes_are_asked() for tensor in tensors]
    outputs = registered.describe(*unshaped, **case.attributes)
    assert types == [output.dtype for output in outputs]
    assert len(outputs) == registered.outputs == len(operation.outputs)
    aliased = [
        None if one.alias is None else registered.tensors[one.alias.index] for one in outputs
    ]
    assert aliased == [operation.aliases.get(name) for name in operation.outputs]
    # The expressions give what our own computation gives for the shapes of a later call.
    specs = {
        key: TensorSpec(case.inputs[key].dtype, shapes[index])
        for index, key in enumerate(operation.inputs)
    }
    for output, spec in zip(
        outputs, operation.output_specs(specs, case.attributes).values(), strict=True
    ):
        if output.alias is None:
            assert tuple(extent.read(shapes) for extent in output.shape_expr) == spec.shape

    (combination,) = registered.tune(*tensors, *case.attributes.values(), outputs)
    assert len(combination.io_types) == len(tensors) + len(outputs)
    tactics = combination.tactics or [0]
    for tactic in tactics:
        name, ptx, params, extras = registered.implement(
            *tensors, *case.attributes.values(), outputs, tactic
        )
        entry, parameters = entry_parameters(ptx)
        assert entry == name
        pointers = ["u64"] * len(operation.inputs), ["u64"] * len(operation.outputs)
        assert parameters == pointers[0] + ["u32"] * len(operation.extras) + pointers[1]
        expected = operation.launch(specs, case.attributes, max(0, tactic - 1))
        grid = tuple(params.__dict__[f"grid_{axis}"].read(shapes) for axis in "xyz")
        assert grid == expected.grid
        assert tuple(extra.read(shapes) for extra in extras) == expected.extras
        assert params.block_x.read(shapes) == expected.warps * 32


@pytest.mark.parametrize(
    ("define", "form"),
    [
        *product((kv_cache_update_function, block_attention_function), KERNEL_FORMS),
        *product((kv_feature_injection_function,), [GraphForm(), *KERNEL_FORMS]),
    ],
)
def test_operands_are_the_kernels(
    define: Callable[[GraphForm], onnx.FunctionProto], form: GraphForm
) -> None:
    function = define(form)
    name = plugin_name(function)
    assert name is not None
    operation = operations()[name]
    assert tuple(function.input) == operation.inputs
    assert tuple(function.output) == operation.outputs
    # What a block's rows are at most is the engine's to say, not the graph's.
    assert set(function.attribute) == operation.attributes.keys() - {"block_size"}


def test_a_type_that_no_kernel_reads_is_refused(plugin: FakePlugin) -> None:
    registered = plugin.plugins["dflash::accept"]
    tensors: list[Any] = [TensorDesc(None, (2, 4), index) for index in range(3)]  # type: ignore[arg-type]
    with pytest.raises(DflashError, match="no kernel reads tensors of None"):
        registered.tune(*tensors, ())


def test_the_extents_that_a_kernel_bakes_in_must_be_fixed(plugin: FakePlugin) -> None:
    (case,) = [one for one in one_case_of_each() if one.operation.name == "row_sample"]
    tensors, _ = describe(case)
    tensors[0] = TensorDesc(tensors[0].dtype, (-1, -1, -1), 0)
    registered = plugin.plugins["dflash::row_sample"]
    with pytest.raises(DflashError, match="the vocabulary must be fixed"):
        registered.implement(*tensors, registered.describe(*tensors), 0)


def test_the_types_are_those_that_tensorrt_has() -> None:
    assert {one.tensorrt_name for one in DType} == {one.name for one in DataType}

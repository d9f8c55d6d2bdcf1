"""Registration and launch as TensorRT asks for them, through NVIDIA's own Python layer."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from dflash_plugins import registration
from dflash_plugins.block_attention.cases import AttentionShape, make_cases
from dflash_plugins.compile import CompiledKernel, Resources, compile_kernel
from dflash_plugins.operation import Case, KernelSpec, Operation
from dflash_plugins.registration import PluginRegistration
from dflash_plugins.table import main_cases, operations

from dflash_trt.backends.kernel_calls import plugin_name
from dflash_trt.errors import DflashError
from dflash_trt.graph.block_attention import block_attention_function
from dflash_trt.graph.form import CacheDtype, GraphForm, Precision
from dflash_trt.graph.gated_delta import gated_delta_function
from dflash_trt.graph.kv_cache_update import kv_cache_update_function, kv_feature_injection_function
from dflash_trt.hardware.kernels import PLUGIN_INTERFACE, kernel_arches
from dflash_trt.models.sizes import RecurrentSizes
from tests.standins.plugin_core import (
    BuiltPlugin,
    IDimensionExpr,
    PluginCore,
    Shapes,
    Told,
    build_plugin,
    create_plugin,
)

pytest.importorskip("triton", reason="Triton language (the plugins extra) is not installed")


ARCH = "sm_120a"
KERNEL_FORMS = [
    GraphForm(cache_dtype=CacheDtype.FP8),
    GraphForm(page_size=16),
    GraphForm(page_size=16, cache_dtype=CacheDtype.FP8),
]
"""Whose every attention and cache write is a kernel's."""
BIGGER = 3
"""Extents that change between calls are this many times as large when the engine runs."""
SHARED = 4096

# Axes that the graphs leave to each call, by tensor; every other extent is fixed in an engine.
DYNAMIC = {
    "k": (0, 1),
    "v": (0, 1),
    "positions": (0, 1),
    "page_table": (0, 1),
    "logits": (0, 1),
    "sampling": (0,),
    "new_rows": (0, 1),
    "rows": (0,),
    "state": (0,),
    "start": (0,),
    "state_start": (0,),
    "rows_end": (0,),
    "side": (0,),
    "token_ids": (0, 1),
    "choice_ids": (0, 1),
    "cache_start": (0,),
    "q": (0, 2),
    "k_cache": (0,),
    "v_cache": (0,),
    "key_value_lengths": (0,),
    "shares": (0,),
    "log_sums": (0,),
    "peaks": (0, 1),
    "weights": (0, 1),
}
DYNAMIC_IN = {("kv_cache_update", "k"): (0, 2), ("kv_cache_update", "v"): (0, 2)}
"""Where an operation has its rows elsewhere: by the first part of its kernel's path."""

TELLINGS = ("changing", "fixed", "one sequence", "one sequence in sizes alone")
"""What TensorRT may tell of the axes that a graph leaves open: nothing; their sizes; that the first
is 1, in a profile of one sequence, as a constant expression or beside one that is no constant."""


def fake_kernel(spec: KernelSpec, arch: str, folder: Path) -> CompiledKernel:
    """Whose code is what it is of."""
    none = Resources(0, 0, 0, 0)
    code = f"{arch} {spec}"
    threads = spec.warps * 32
    return CompiledKernel(spec.kernel, arch, f"ptx {code}", code.encode(), threads, SHARED, none)


@cache
def layer(arch: str) -> PluginCore:
    """With all operations, registered twice: what is known is kept. Nothing is compiled."""
    core = PluginCore()
    registered = PluginRegistration(core, core.plugin, arch, Path("none"), fake_kernel)
    registered.register()
    known = dict(core.registered)
    assert list(known) == [one.plugin_id for one in operations().values()]
    registered.register()
    assert all(core.registered[name] is one for name, one in known.items())
    return core


def tell(core: PluginCore, case: Case, telling: str) -> tuple[list[Told], Shapes]:
    """The inputs as TensorRT tells of them when it builds, and their shapes in a later call."""
    inputs: list[Told] = []
    shapes = []
    for index, name in enumerate(case.operation.inputs):
        spec = case.inputs[name]
        open_axes = DYNAMIC_IN.get((case.operation.kernel, name), DYNAMIC.get(name, ()))
        known, extents, called = [], [], []
        for axis, size in enumerate(spec.shape):
            is_open = axis in open_axes and telling != "fixed"
            is_one = is_open and axis == 0 and telling.startswith("one")
            called.append(1 if is_one else size * BIGGER if is_open else size)
            known.append(called[-1] if is_one or not is_open else -1)
            if known[-1] == -1 or (is_one and telling.endswith("alone")):
                extents.append(IDimensionExpr(lambda all, i=index, a=axis: all[i][a]))
            else:
                extents.append(IDimensionExpr.of(known[-1]))
        dtype = getattr(core.DataType, spec.dtype.tensorrt_name)
        inputs.append(Told(dtype, tuple(known), tuple(extents)))
        shapes.append(tuple(called))
    return inputs, shapes


def as_told(case: Case, shapes: Shapes) -> Case:
    """`case` at `shapes`, with the attributes that a parser keeps of floats."""
    names = case.operation.inputs
    inputs = {
        name: replace(case.inputs[name], shape=shape)
        for name, shape in zip(names, shapes, strict=True)
    }
    attributes = {
        name: float(np.float32(value)) if isinstance(value, float) else value
        for name, value in case.attributes.items()
    }
    return replace(case, inputs=inputs, attributes=attributes)


def build(core: PluginCore, case: Case, told: list[Told] | None = None) -> BuiltPlugin:
    plugin = create_plugin(core, case.operation.name, case.attributes)
    return build_plugin(plugin, told or tell(core, case, "changing")[0])


def one_case_of_each() -> list[Case]:
    """The first of each, which `test_compile.py` compiles daily."""
    cases = {case.operation.name: case for case in reversed(main_cases())}
    assert set(cases) == set(operations())
    return list(cases.values())


def short_splits() -> list[Case]:
    """Caches of so few positions that they have less than the most shares."""
    shape = AttentionShape(64, 8, 64, 2048, is_causal=True)
    split, merge = make_cases("2,048 positions", shape, batch=8)
    paged, _ = make_cases("2,048 positions", replace(shape, page_size=32), batch=8)
    return [split, paged, merge]


def layers() -> Iterator[object]:
    """Daily: every telling for one architecture, and one for the others."""
    for arch, telling in product(kernel_arches(), TELLINGS):
        is_daily = arch == ARCH or telling == TELLINGS[2]
        yield pytest.param(arch, telling, marks=() if is_daily else pytest.mark.exhaustive)


@pytest.mark.parametrize(("arch", "telling"), layers())
def test_tensorrt_is_told_types_shapes_aliases_and_launch(arch: str, telling: str) -> None:
    core = layer(arch)
    for case in [*main_cases(), *short_splits()]:
        operation, where = case.operation, f"{case.operation.name}, {case.name}"
        told, shapes = tell(core, case, telling)
        built, called = build(core, case, told), as_told(case, shapes)
        aliases = [operation.aliases.get(name) for name in operation.outputs]
        assert [operation.inputs[one] if one >= 0 else None for one in built.aliases] == aliases
        # The expressions give what our own computation gives for the shapes of a later call.
        outputs = called.outputs.values()
        assert [str(one).rpartition(".")[2] for one in built.types] == [
            spec.dtype.tensorrt_name for spec in outputs
        ], where
        found = [tuple(one.read(shapes) for one in shape) for shape in built.shapes]
        assert found == [spec.shape for spec in outputs], where
        tactics = list(range(1, operation.tactics + 1)) if operation.tactics > 1 else [0]
        assert list(built.launches) == tactics, where
        for tactic, launch in enumerate(built.launches.values()):
            expected = called.launch(tactic)
            assert tuple(one.read(shapes) for one in launch.grid) == expected.grid, where
            assert tuple(one.read(shapes) for one in launch.extras) == expected.extras, where
            threads = tuple(one.get_constant_value() for one in launch.block)
            assert threads == (expected.warps * 32, 1, 1), where
            assert launch.shared.get_constant_value() == SHARED
            assert launch.code == f"{arch} {called.kernel_spec(tactic)}".encode(), where


@pytest.fixture(scope="module")
def compiling(kernels: Path) -> PluginCore:
    """With the compiler of engines."""
    core = PluginCore()
    PluginRegistration(core, core.plugin, ARCH, kernels).register()
    return core


EMBEDDED = "accept", "block_attention_paged_fp8", "gated_delta_step"
"""Operations of one tactic and of several, whose kernels are compiled daily anyway."""


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case,
            marks=() if case.operation.name in EMBEDDED else pytest.mark.exhaustive,
            id=case.operation.name,
        )
        for case in one_case_of_each()
    ],
)
def test_engines_embed_machine_code(compiling: PluginCore, kernels: Path, case: Case) -> None:
    own = as_told(case, [case.inputs[name].shape for name in case.operation.inputs])
    for tactic, launch in enumerate(build(compiling, case).launches.values()):
        kernel = compile_kernel(own.kernel_spec(tactic), ARCH, kernels)
        assert (launch.name, launch.code) == (kernel.name, kernel.cubin)
        assert launch.shared.get_constant_value() == kernel.shared_bytes
        assert launch.block[0].get_constant_value() == kernel.threads


def test_the_next_build_may_want_ptx_or_another_architecture() -> None:
    core, case = PluginCore(), one_case_of_each()[0]
    registration = PluginRegistration(core, core.plugin, ARCH, Path("none"), fake_kernel)
    registration.register()
    machine, ptx = f"{ARCH} ".encode(), f"ptx {ARCH} ".encode()
    for code, arch, start in (
        ("cubin", ARCH, machine),
        ("ptx", ARCH, ptx),
        ("cubin", "sm_103a", b"sm_103a "),
    ):
        registration.code, registration.arch = code, arch  # type: ignore[assignment]
        (launch, *_) = build(core, case).launches.values()
        assert launch.code.startswith(start)


def test_what_is_timed_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """By attributes and the kernel's source; by types and shapes TensorRT does itself."""
    core = layer(ARCH)

    def timing(case: Case) -> str:
        return build(core, case).timing_id

    shape = AttentionShape(64, 8, 64, 256, is_causal=True)
    whole, window = (make_cases("", replace(shape, window=most), batch=8)[0] for most in (0, 128))
    assert whole.inputs == window.inputs and whole.operation is window.operation
    assert timing(whole) == timing(whole) != timing(window)
    ids = {(case.operation.name, *case.attributes.items()): timing(case) for case in main_cases()}
    assert len(set(ids.values())) == len(ids)
    source = type("Kernel", (), {"cache_key": "changed"})
    before = timing(whole)
    monkeypatch.setattr(registration, "load_kernel", lambda name: source)
    assert timing(whole) != before


@pytest.mark.parametrize(
    ("define", "form"),
    [
        *product((kv_cache_update_function, block_attention_function), KERNEL_FORMS),
        *product((kv_feature_injection_function,), [GraphForm(), *KERNEL_FORMS]),
        (
            partial(gated_delta_function, sizes=RecurrentSizes(2, 4, 128, 4)),
            GraphForm(Precision.BFLOAT16, draws=True, replay=16),
        ),
    ],
)
def test_operands_are_the_kernels(
    define: Callable[[GraphForm], onnx.FunctionProto], form: GraphForm
) -> None:
    function = define(form)
    name = plugin_name(function)
    assert name is not None
    registered = layer(ARCH).registered[operations()[name].plugin_id]
    assert list(function.input) == registered.input_tensor_names
    assert len(function.output) == registered.num_outputs
    assert tuple(function.output) == operations()[name].outputs
    # What a block's rows are at most is the engine's to say, not the graph's.
    assert set(function.attribute) == registered.input_attrs.keys() - {"block_size"}


def _case_of(name: str) -> tuple[Case, list[Told]]:
    case = next(one for one in main_cases() if one.operation.name == name)
    return case, tell(layer(ARCH), case, "changing")[0]


def test_a_type_that_no_kernel_reads_is_refused() -> None:
    core = layer(ARCH)
    case, told = _case_of("accept")
    wrong: Any = [replace(one, dtype=core.DataType.INT8) for one in told]
    with pytest.raises(DflashError, match=r"no kernel reads tensors of DataType\.INT8"):
        build(core, case, wrong)


def test_the_extents_that_a_kernel_bakes_in_must_be_fixed() -> None:
    case, (logits, *others) = _case_of("row_sample")
    changing = IDimensionExpr(lambda shapes: shapes[0][2])
    logits = replace(logits, dims=(-1, -1, -1), extents=(*logits.extents[:2], changing))
    with pytest.raises(DflashError, match="the vocabulary must be fixed"):
        build(layer(ARCH), case, [logits, *others])


RECORD = Path(__file__).with_name("interface.json")


def describe(operation: Operation) -> str:
    """Inputs, attributes and outputs, each with the input that it updates."""
    inputs = [*operation.inputs, *(f"{n}: {k.__name__}" for n, k in operation.attributes.items())]
    outputs = [
        f"{name} = {operation.aliases[name]}" if name in operation.aliases else name
        for name in operation.outputs
    ]
    return f"{', '.join(inputs)} -> {', '.join(outputs)}"


def test_other_operands_have_another_number() -> None:
    """Else an engine of before would run where its operands are no longer meant.

    Raise PLUGIN_INTERFACE, then take what is found here into interface.json.
    """
    found = {name: describe(one) for name, one in operations().items()}
    assert json.loads(RECORD.read_text()) == {"interface": PLUGIN_INTERFACE, "operations": found}

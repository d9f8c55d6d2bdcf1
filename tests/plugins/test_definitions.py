"""Operations over paged and FP8 caches: kernels and the graph's functions are the same thing.

The same operands in the same order, and interpreted kernels against the bodies that ONNX Runtime
runs. FP8 stores are left to a GPU, since the interpreter gets them wrong; loads are right.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest
from dflash_plugins.block_attention.cases import AttentionShape
from dflash_plugins.block_attention.error_bound import BODY, error_bound
from dflash_plugins.block_attention.inputs import attend, expect
from dflash_plugins.block_attention.inputs import make_inputs as attention_inputs
from dflash_plugins.kv_cache_update.launch import make_case
from dflash_plugins.kv_caches import WriteShape
from dflash_plugins.operation import DType
from dflash_plugins.table import operations
from dflash_plugins.testing.cache_writes import make_inputs as update_inputs
from dflash_plugins.testing.interpreter import Interpreter
from dflash_plugins.testing.numeric import assert_close, assert_same_bits

from dflash_trt.backends.tensorrt.build.plugins import plugin_name
from dflash_trt.graph.block_attention import block_attention_function
from dflash_trt.graph.form import CacheDtype, GraphForm, Precision
from dflash_trt.graph.kv_cache_update import kv_cache_update_function
from dflash_trt.graph.kv_feature_injection import kv_feature_injection_function
from tests.graph.functions import run_function

pytestmark = pytest.mark.numeric

FORMS = [
    GraphForm(Precision.BFLOAT16, page_size=page_size, cache_dtype=dtype)
    for page_size in (None, 16)
    for dtype in CacheDtype
    if page_size or dtype is CacheDtype.FP8
]


@pytest.mark.parametrize("form", FORMS, ids=["fp8", "paged", "paged_fp8"])
@pytest.mark.parametrize(
    "define",
    [kv_cache_update_function, kv_feature_injection_function, block_attention_function],
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


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.FLOAT16])
def test_a_paged_update_is_its_functions_body(interpreter: Interpreter, dtype: DType) -> None:
    sizes = {"batch": 3, "rows": 5, "kv_heads": 2, "head_dim": 64, "length": 32}
    case = make_case("case", WriteShape(compute=dtype, page_size=8, pages=20, **sizes))
    inputs = update_inputs(case, [0, 6, 27])
    kernel = interpreter.run(case.operation.name, inputs, case.attributes)
    body = run_function(kv_cache_update_function(GraphForm(page_size=8)), inputs, page_size=8)
    for got, want in zip(kernel.values(), body, strict=True):
        assert_same_bits(got, want)


@pytest.mark.parametrize(("is_causal", "window"), [(True, 0), (False, 0), (True, 9), (False, 9)])
@pytest.mark.parametrize("form", FORMS, ids=["fp8", "paged", "paged_fp8"])
def test_attention_is_its_functions_body(
    interpreter: Interpreter, form: GraphForm, is_causal: bool, window: int
) -> None:
    """float32 queries, which the interpreter multiplies right, over what the form caches."""
    shape = AttentionShape(
        4,
        2,
        64,
        96,
        block_size=4,
        compute=DType.FLOAT32,
        cache=DType.FLOAT8 if form.is_fp8 else DType.FLOAT32,
        page_size=form.page_size,
        is_causal=is_causal,
        window=window,
    )
    inputs = attention_inputs(shape, [4, 61, 96], has_sinks=True)
    expected = expect(shape, inputs)
    attended = attend(interpreter.run, shape, inputs)
    assert_close(attended, expected, error_bound(shape, inputs, expected))
    function = block_attention_function(form)
    for name in ("k_cache", "v_cache"):  # a body reads what only a window has left behind
        cache = inputs[name].astype(np.float32)
        inputs[name] = np.nan_to_num(cache).astype(inputs[name].dtype)
    (body,) = run_function(function, inputs, is_causal=int(is_causal), window=window)
    assert_close(body, expected, error_bound(shape, inputs, expected, BODY))

"""The injection kernel over pages, interpreted, against the paged function's body."""

from __future__ import annotations

import pytest
from dflash_plugins.kv_feature_injection.launch import make_case
from dflash_plugins.kv_feature_injection.reference import error_bound, inject
from dflash_plugins.operation import DType
from dflash_plugins.testing.cache_writes import make_inputs
from dflash_plugins.testing.interpreter import Interpreter
from dflash_plugins.testing.numeric import assert_close, assert_same_bits

from dflash_trt.backends.tensorrt.build.plugins import plugin_name
from dflash_trt.graph.form import GraphForm, Precision
from dflash_trt.graph.kv_feature_injection import kv_feature_injection_function
from tests.plugins.bodies import run_body

pytestmark = pytest.mark.numeric


@pytest.mark.parametrize("page_size", [4, 16])
@pytest.mark.parametrize(
    ("dtype", "precision"),
    [(DType.FLOAT32, Precision.FLOAT32), (DType.FLOAT16, Precision.FLOAT16)],
)
def test_kernel_equals_the_paged_functions_body(
    interpreter: Interpreter, dtype: DType, precision: Precision, page_size: int
) -> None:
    case = make_case(
        "paged",
        compute=dtype,
        batch=3,
        rows=4,
        kv_heads=4,
        head_dim=64,
        length=32,
        page_size=page_size,
        pages=50,
    )
    inputs = make_inputs(case, [0, 14, 28])
    outputs = list(interpreter.run(case.operation.name, inputs, case.attributes).values())
    function = kv_feature_injection_function(GraphForm(precision, page_size=page_size))
    assert plugin_name(function) == case.operation.name
    bodies = run_body(function, inputs, case.attributes)
    expected, _ = inject(case, inputs)
    assert_close(outputs[0], expected, error_bound(case, inputs, expected))
    assert_close(bodies[0], expected, error_bound(case, inputs, expected, products=1))
    assert_same_bits(outputs[1], bodies[1])

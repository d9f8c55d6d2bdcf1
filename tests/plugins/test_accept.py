"""The accept kernel, interpreted, against the function's body and the runtime's rule."""

from __future__ import annotations

import pytest
from dflash_plugins.accept.checks import expect, make_inputs
from dflash_plugins.testing.numeric import assert_same_bits

from dflash_trt.graph.drawing import accept_function
from dflash_trt.hardware.kernels import MAX_ROWS
from tests.graph.functions import run_function
from tests.plugins.interpreter import Interpreter


@pytest.mark.parametrize(("batch", "rows"), [(1, 1), (3, 2), (40, 8), (9, 16), (5, MAX_ROWS)])
def test_kernel_body_and_runtime_settle_the_same_tokens(
    interpreter: Interpreter, batch: int, rows: int
) -> None:
    inputs = make_inputs(batch, rows)
    outputs = interpreter.run("accept", inputs)
    for name, expected in expect(inputs).items():
        assert_same_bits(outputs[name], expected)
    bodies = run_function(accept_function(), inputs)
    for actual, expected in zip(outputs.values(), bodies, strict=True):
        assert_same_bits(actual, expected)

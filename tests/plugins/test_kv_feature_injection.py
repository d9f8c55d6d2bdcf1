"""The injection kernel, interpreted, against a float64 reference; V's rows to the bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from dflash_plugins.kv_caches import WriteShape
from dflash_plugins.kv_feature_injection.accuracy import error_bound, inject
from dflash_plugins.kv_feature_injection.launch import make_case
from dflash_plugins.operation import Case, DType
from dflash_plugins.testing.cache_writes import make_inputs
from dflash_plugins.testing.interpreter import Interpreter
from dflash_plugins.testing.numeric import Array, assert_close, assert_same_bits

from tests.plugins.conftest import WRITTEN_HEADS

pytestmark = pytest.mark.numeric


def shaped(compute: DType = DType.FLOAT32, heads: tuple[int, int] = (2, 16), **other: Any) -> Case:
    sizes = {"batch": 3, "rows": 4, "length": 32} | other
    return make_case(
        "case", WriteShape(compute=compute, kv_heads=heads[0], head_dim=heads[1], **sizes)
    )


def check(
    interpreter: Interpreter, case: Case, inputs: dict[str, Array], *, cut: bool = False
) -> None:
    outputs = interpreter.run(case.operation.name, inputs, case.attributes)
    both = inject(case, inputs)
    bounds: tuple[Array | float, ...] = (error_bound(case, inputs, both[0], cut=cut), 0.0)
    for name, expected, bound in zip(outputs, both, bounds, strict=True):
        before = inputs[name.removesuffix("_out")]
        changed = expected != before.astype(np.float64)
        assert_close(outputs[name], expected, bound)
        kept = np.where(changed, before, outputs[name])
        assert_same_bits(kept, before)


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.FLOAT16])
@pytest.mark.parametrize(
    "sizes",
    [
        *({"heads": heads} for heads in WRITTEN_HEADS),
        # Rows begin, cross and end at page borders, over pages in no order.
        *({"heads": (4, 64), "page_size": size, "pages": 100} for size in (1, 4, 16)),
    ],
)
def test_kernel_is_within_its_bound(
    interpreter: Interpreter, dtype: DType, sizes: dict[str, Any]
) -> None:
    case = shaped(dtype, **sizes)
    check(interpreter, case, make_inputs(case, [0, 14, 28]))


@pytest.mark.parametrize("page_size", [None, 4, 16])
def test_bfloat16_to_one_unit_of_the_last_place(
    interpreter: Interpreter, page_size: int | None
) -> None:
    case = shaped(DType.BFLOAT16, (2, 64), batch=2, rows=5, page_size=page_size)
    # The interpreter cuts float32 off where hardware rounds to bfloat16: twice, with k's norm.
    check(interpreter, case, make_inputs(case, [3, 27]), cut=True)


@pytest.mark.parametrize("page_size", [None, 8])
def test_a_row_that_has_no_place_is_not_written(
    interpreter: Interpreter, page_size: int | None
) -> None:
    case = shaped(DType.FLOAT16, length=16, page_size=page_size)
    inputs = make_inputs(case, [14, -2, 3])
    tables = {name: np.concatenate([inputs[name]] * 2) for name in ("cos", "sin")}
    inputs |= tables  # positions past the cache are still within the table
    if page_size is not None:
        inputs["page_table"][2, 0] = -1
    check(interpreter, case, inputs)


@pytest.mark.parametrize(("batch", "rows"), [(0, 4), (2, 0), (1, 1)])
def test_few_rows_and_none(interpreter: Interpreter, batch: int, rows: int) -> None:
    case = shaped(batch=batch, rows=rows)
    check(interpreter, case, make_inputs(case, [2] * batch))


@pytest.mark.parametrize("page_size", [None, 8])
def test_fp8_codes_are_the_codecs_where_the_interpreter_rounds_right(
    interpreter: Interpreter, page_size: int | None
) -> None:
    """The interpreter rounds some wrong; the check on a GPU wants every code."""
    case = shaped(DType.FLOAT16, (4, 64), cache=DType.FLOAT8, batch=2, page_size=page_size)
    inputs = make_inputs(case, [5, 28])
    inputs["v"][0, 0, 0] = 60000.0  # clipped
    outputs = interpreter.run(case.operation.name, inputs, case.attributes)
    for name, expected in zip(outputs, inject(case, inputs), strict=True):
        right = expected.astype(DType.FLOAT8.numpy).view(np.uint8)
        wrong = np.count_nonzero(outputs[name].view(np.uint8) != right)
        assert wrong < 0.06 * inputs["k"].size
        assert_close(outputs[name], expected.astype(np.float64), 0.5)


def test_a_wrong_kernel_is_noticed(interpreter: Interpreter) -> None:
    case = shaped(heads=(1, 16), batch=1, rows=2)
    inputs = make_inputs(case, [3])
    outputs = interpreter.run(case.operation.name, inputs, {"epsilon": 0.5})
    expected, _ = inject(case, inputs)
    with pytest.raises(AssertionError, match=r"first at \(0, 0, 3, 0\)"):
        assert_close(outputs["k_cache_out"], expected, error_bound(case, inputs, expected))

"""Cache writes, interpreted: copies to the bit, k_norm and RoPE against float64, FP8 codes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dflash_plugins.compile import compile_kernel
from dflash_plugins.kv_cache_update import checks
from dflash_plugins.kv_cache_update.checks import update
from dflash_plugins.kv_cache_update.launch import make_case as update_case
from dflash_plugins.kv_caches import WriteShape
from dflash_plugins.kv_feature_injection.checks import error_bound, inject
from dflash_plugins.kv_feature_injection.launch import make_case as injection_case
from dflash_plugins.operation import Attributes, Case, DType
from dflash_plugins.table import main_cases
from dflash_plugins.testing.cache_writes import make_inputs
from dflash_plugins.testing.guarded import Arrays
from dflash_plugins.testing.numeric import Array, check_all

from tests.plugins.interpreter import Interpreter, assert_close, assert_same_bits

WRITERS = {"kv_cache_update": update_case, "kv_feature_injection": injection_case}
EACH = pytest.mark.parametrize("name", WRITERS)
FLOATS = DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16
HEADS = [(8, 128), (8, 64), (1, 256), (20, 64), (3, 80)]
"""KV heads and head sizes of public pairs, a single head, more heads than one program takes, and a
head size that is no power of two."""


def shaped(
    name: str, compute: DType = DType.FLOAT16, heads: tuple[int, int] = (2, 16), **other: Any
) -> Case:
    """A small write; `kv_cache_update` has no form but paged ones in the type of the rows."""
    sizes = {"batch": 3, "rows": 4, "length": 32} | other
    if name == "kv_cache_update" and "cache" not in other:
        sizes.setdefault("page_size", 8)
    shape = WriteShape(compute=compute, kv_heads=heads[0], head_dim=heads[1], **sizes)
    return WRITERS[name](shape)


def check(
    interpreter: Interpreter, case: Case, inputs: dict[str, Array], *, cut: bool = False
) -> None:
    """Written rows are right and what no row is for keeps its bits."""
    outputs = interpreter.run(case.operation.name, inputs, case.attributes)
    if case.operation.kernel == "kv_cache_update":
        for name, expected in zip(outputs, update(inputs), strict=True):
            assert_same_bits(outputs[name], expected)
        return
    both = inject(case, inputs)
    bounds: tuple[Array | float, ...] = (error_bound(case, inputs, both[0], cut=cut), 0.0)
    for name, expected, bound in zip(outputs, both, bounds, strict=True):
        before = inputs[name.removesuffix("_out")]
        changed = expected != before.astype(np.float64)
        assert_close(outputs[name], expected, bound)
        assert_same_bits(np.where(changed, before, outputs[name]), before)


@EACH
@pytest.mark.parametrize(("number", "heads"), enumerate(HEADS))
def test_heads_of_every_shape(
    interpreter: Interpreter, name: str, number: int, heads: tuple[int, int]
) -> None:
    floats = FLOATS if name == "kv_cache_update" else FLOATS[:2]
    case = shaped(name, floats[number % len(floats)], heads)
    check(interpreter, case, make_inputs(case, [0, 14, 28]))


@EACH
@pytest.mark.parametrize(
    ("sizes", "starts"),
    [
        # Rows begin, cross and end at page borders, over pages in no order.
        *(({"page_size": size, "pages": 100}, [0, 14, 28]) for size in (1, 4, 16, 24)),
        # A prompt's chunk.
        ({"batch": 1, "rows": 100, "length": 160, "page_size": 32, "heads": (2, 64)}, [33]),
        # Few rows and none.
        ({"batch": 0, "page_size": 8, "pages": 8}, []),
        ({"batch": 2, "rows": 0}, [2, 2]),
        ({"batch": 1, "rows": 1}, [2]),
    ],
)
def test_rows_of_any_number_stand_where_they_belong(
    interpreter: Interpreter, name: str, sizes: dict[str, Any], starts: list[int]
) -> None:
    case = shaped(name, **sizes)
    check(interpreter, case, make_inputs(case, starts))


@EACH
def test_rows_that_do_not_follow_one_another(interpreter: Interpreter, name: str) -> None:
    case = shaped(name, page_size=8, pages=50)
    inputs = make_inputs(case, [0, 0, 0])
    inputs["positions"] = np.array([[31, 0, 9, 8], [5, 4, 3, 2], [7, 8, 15, 16]])
    check(interpreter, case, inputs)


@pytest.mark.parametrize("page_size", [None, 16])
def test_injection_in_bfloat16_to_one_unit_of_the_last_place(
    interpreter: Interpreter, page_size: int | None
) -> None:
    sizes = {"batch": 2, "rows": 5, "page_size": page_size}
    case = shaped("kv_feature_injection", DType.BFLOAT16, (2, 64), **sizes)
    # The interpreter cuts float32 off where hardware rounds to bfloat16: twice, with k's norm.
    check(interpreter, case, make_inputs(case, [3, 27]), cut=True)


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("kv_cache_update", {"page_size": 8}),
        ("kv_cache_update", {"cache": DType.FLOAT8}),
        ("kv_feature_injection", {}),
        ("kv_feature_injection", {"page_size": 8}),
    ],
)
def test_a_row_that_has_no_place_is_not_written(
    interpreter: Interpreter, name: str, form: dict[str, Any]
) -> None:
    """With values that every rounding to FP8 leaves alone."""
    case = shaped(name, length=16, **form)
    inputs = make_inputs(case, [14, -2, 3])
    if "page_table" in inputs:
        inputs["page_table"][2, 0] = -1
    if "cache" in form:
        inputs["kv_scales"] = np.array([0.5, 2.0], np.float32)
        inputs |= {one: np.sign(inputs[one]) * inputs[one].dtype.type(4) for one in "kv"}
    if name == "kv_cache_update":
        inputs["positions"][1, 3] = 2**40  # a column whose number no int32 holds
    else:  # the reference looks up angles past the cache
        inputs |= {one: np.concatenate([inputs[one]] * 2) for one in ("cos", "sin")}
    check(interpreter, case, inputs)


@EACH
@pytest.mark.parametrize("page_size", [None, 8])
def test_fp8_codes_are_the_codecs_where_the_interpreter_rounds_right(
    interpreter: Interpreter, name: str, page_size: int | None
) -> None:
    """The interpreter rounds some wrong; the check on a GPU wants every code."""
    case = shaped(name, heads=(4, 64), cache=DType.FLOAT8, page_size=page_size)
    inputs = make_inputs(case, [5, 28, 0])
    inputs["k"][0, 0, 0], inputs["v"][0, 0, 1] = 60000.0, 60000.0  # clipped
    inputs["v"][0, 0, 0, :3] = [np.inf, -np.inf, -0.0]
    outputs = interpreter.run(case.operation.name, inputs, case.attributes)
    is_copy = name == "kv_cache_update"
    both = update(inputs) if is_copy else inject(case, inputs)
    for written, expected in zip(outputs, both, strict=True):
        right = expected.astype(DType.FLOAT8.numpy).view(np.uint8)
        wrong = outputs[written].view(np.uint8) != right
        before = inputs[written.removesuffix("_out")].view(np.uint8)
        assert np.count_nonzero(wrong) < 0.06 * inputs["k"].size
        assert not (wrong & (right == before)).any()
        assert_close(outputs[written], expected.astype(np.float64), 0.5)


@pytest.mark.parametrize("folder", WRITERS)
def test_clipping_keeps_what_is_no_number(kernels: Path, folder: str) -> None:
    """A cache that hid it would hide that the output means nothing. The interpreter always keeps
    it, so machine code tells: `min.f32` of NaN and a number is the number."""
    pytest.importorskip("triton", reason="Triton language (the plugins extra) is not installed")
    case = next(one for one in main_cases([folder]) if "kv_scales" in one.inputs)
    ptx = compile_kernel(case.kernel_spec(), "sm_120a", kernels).ptx
    found = set(re.findall(r"\bm(?:in|ax)[\w.]*\.f32\b", ptx))
    assert found == {"min.NaN.xorsign.abs.f32"}


def test_the_check_on_a_gpu_asks_for_what_the_kernel_does(interpreter: Interpreter) -> None:
    """And it sees one bit that is wrong."""
    asked = {check.name: check for check in checks.checks()}
    assert len(asked) == len(checks.checks())
    chosen = asked["kv_cache_update, bf16 bf16 cache, 3 × 80, 4 × 16 rows, pages of 24"]
    assert [one.mismatch for one in check_all([chosen], interpreter.run)] == [None, None]

    def wrong(name: str, inputs: Arrays, attributes: Attributes) -> dict[str, Array]:
        k, v = update(dict(inputs))
        v.view(np.uint8).reshape(-1)[0] ^= 1
        return {"k_cache_out": k, "v_cache_out": v}

    assert [one.mismatch is None for one in check_all([chosen], wrong)] == [True, False]


def test_a_wrong_injection_is_noticed(interpreter: Interpreter) -> None:
    case = shaped("kv_feature_injection", DType.FLOAT32, (1, 16), batch=1, rows=2)
    inputs = make_inputs(case, [3])
    outputs = interpreter.run(case.operation.name, inputs, {"epsilon": 0.5})
    expected, _ = inject(case, inputs)
    with pytest.raises(AssertionError, match=r"first at \(0, 0, 3, 0\)"):
        assert_close(outputs["k_cache_out"], expected, error_bound(case, inputs, expected))

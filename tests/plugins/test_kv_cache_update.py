"""The cache write, interpreted, against the codec and an explicit copy: the same bits."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dflash_plugins.compile import compile_kernel
from dflash_plugins.kv_cache_update import accuracy
from dflash_plugins.kv_cache_update.accuracy import accuracy_cases, check_case, update
from dflash_plugins.kv_cache_update.benchmark import update_by_operation
from dflash_plugins.kv_cache_update.launch import LAYOUTS, make_case
from dflash_plugins.kv_caches import WriteShape
from dflash_plugins.operation import Attributes, Case, DType
from dflash_plugins.table import main_cases
from dflash_plugins.testing.cache_writes import make_inputs
from dflash_plugins.testing.gpu import to_torch
from dflash_plugins.testing.guarded import Arrays
from dflash_plugins.testing.interpreter import Interpreter
from dflash_plugins.testing.numeric import Array, assert_close, assert_same_bits

from tests.plugins.conftest import WRITTEN_HEADS

pytestmark = pytest.mark.numeric


def shaped(compute: DType = DType.FLOAT16, heads: tuple[int, int] = (2, 16), **other: Any) -> Case:
    sizes = {"batch": 3, "rows": 4, "length": 32, "page_size": 8} | other
    return make_case(
        "case", WriteShape(compute=compute, kv_heads=heads[0], head_dim=heads[1], **sizes)
    )


def check(interpreter: Interpreter, case: Case, inputs: dict[str, Array]) -> None:
    outputs = interpreter.run(case.operation.name, inputs, case.attributes)
    for name, expected in zip(outputs, update(inputs), strict=True):
        assert_same_bits(outputs[name], expected)


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16])
@pytest.mark.parametrize("heads", WRITTEN_HEADS)
def test_pages_hold_the_rows_bit_for_bit(
    interpreter: Interpreter, dtype: DType, heads: tuple[int, int]
) -> None:
    """What no row is for keeps its bits."""
    case = shaped(dtype, heads, pages=50)
    check(interpreter, case, make_inputs(case, [0, 7, 28]))


@pytest.mark.parametrize(
    ("sizes", "starts"),
    [
        # Rows begin, cross and end at page borders.
        *(({"page_size": size, "pages": 100}, [0, 14, 28]) for size in (1, 4, 16, 24)),
        # A prompt's chunk.
        ({"batch": 1, "rows": 100, "length": 160, "page_size": 32, "heads": (2, 64)}, [33]),
        # Few rows and none.
        ({"batch": 0, "pages": 8}, []),
        ({"batch": 2, "rows": 0, "pages": 8}, [2, 2]),
        ({"batch": 1, "rows": 1, "pages": 8}, [2]),
    ],
)
def test_rows_of_any_number_stand_where_they_belong(
    interpreter: Interpreter, sizes: dict[str, Any], starts: list[int]
) -> None:
    case = shaped(**sizes)
    check(interpreter, case, make_inputs(case, starts))


def test_rows_that_do_not_follow_one_another(interpreter: Interpreter) -> None:
    case = shaped(pages=50)
    inputs = make_inputs(case, [0, 0, 0])
    inputs["positions"] = np.array([[31, 0, 9, 8], [5, 4, 3, 2], [7, 8, 15, 16]])
    check(interpreter, case, inputs)


def test_a_row_that_has_no_place_is_not_written(interpreter: Interpreter) -> None:
    case = shaped(length=16)
    inputs = make_inputs(case, [14, -2, 3])
    inputs["page_table"][2, 0] = -1
    inputs["positions"][1, 3] = 2**40  # a column whose number no int32 holds
    check(interpreter, case, inputs)


@pytest.mark.parametrize("page_size", [None, 8])
@pytest.mark.parametrize("compute", [DType.FLOAT16, DType.BFLOAT16])
def test_fp8_codes_are_the_codecs_where_the_interpreter_rounds_right(
    interpreter: Interpreter, compute: DType, page_size: int | None
) -> None:
    """The interpreter rounds some wrong; the check on a GPU wants every code."""
    case = shaped(compute, cache=DType.FLOAT8, page_size=page_size, heads=(4, 64))
    inputs = make_inputs(case, [5, 28, 0])
    inputs["k"][0, 0, 0] = 60000.0  # clipped
    inputs["v"][0, 0, 0, :3] = [np.inf, -np.inf, -0.0]
    outputs = interpreter.run(case.operation.name, inputs, case.attributes)
    for name, expected in zip(outputs, update(inputs), strict=True):
        wrong = outputs[name].view(np.uint8) != expected.view(np.uint8)
        before = inputs[name.removesuffix("_out")].view(np.uint8)
        assert np.count_nonzero(wrong) < 0.06 * inputs["k"].size
        assert not (wrong & (expected.view(np.uint8) == before)).any()
        assert_close(outputs[name], expected.astype(np.float64), 0.5)


def test_linear_fp8_rows_outside_of_the_cache_are_not_written(interpreter: Interpreter) -> None:
    """With values that every rounding leaves alone."""
    case = shaped(cache=DType.FLOAT8, length=16, page_size=None)
    inputs = make_inputs(case, [14, -2, 3])
    inputs["kv_scales"] = np.array([0.5, 2.0], np.float32)
    for name in "kv":
        inputs[name] = np.sign(inputs[name]) * inputs[name].dtype.type(4)
    check(interpreter, case, inputs)


@pytest.mark.parametrize("folder", ["kv_cache_update", "kv_feature_injection"])
def test_clipping_keeps_what_is_no_number(kernels: Path, folder: str) -> None:
    """A cache that hid it would hide that the output means nothing. The interpreter always keeps
    it, so machine code tells: `min.f32` of NaN and a number is the number."""
    pytest.importorskip("triton", reason="Triton language (the plugins extra) is not installed")
    case = next(one for one in main_cases([folder]) if "kv_scales" in one.inputs)
    ptx = compile_kernel(case.kernel_spec(), "sm_120a", kernels).ptx
    found = set(re.findall(r"\bm(?:in|ax)[\w.]*\.f32\b", ptx))
    assert found == {"min.NaN.xorsign.abs.f32"}


def test_the_check_on_a_gpu_asks_for_what_the_kernel_does(
    interpreter: Interpreter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And it sees a kernel that is wrong, and one bit that is."""
    cases = {case.name: (case, starts) for case, starts in accuracy_cases()}
    assert len(cases) == len(accuracy_cases())
    chosen = cases["bf16 bf16 cache, 3 × 80, 16 rows, pages of 24"]
    assert [one.mismatch for one in check_case(interpreter.run, *chosen)] == [None, None]

    def wrong(name: str, inputs: Arrays, attributes: Attributes) -> dict[str, Array]:
        k, v = update(dict(inputs))
        v.view(np.uint8).reshape(-1)[0] ^= 1
        return {"k_cache_out": k, "v_cache_out": v}

    small = [one for name, one in cases.items() if "3 × 80" in name and ", 16 rows" in name]
    monkeypatch.setattr(accuracy, "accuracy_cases", lambda: small)
    verdicts = accuracy.check_accuracy(wrong)
    assert [one.mismatch is None for one in verdicts] == [True, False] * len(accuracy.LAYOUTS)


def test_the_benchmarks_rival_computes_the_same() -> None:
    """Bit for bit: PyTorch rounds to FP8 as the codec does."""
    torch = pytest.importorskip("torch")
    for cache, page_size in LAYOUTS:
        case = shaped(cache=cache, compute=DType.BFLOAT16, page_size=page_size)
        inputs = make_inputs(case, [5, 28, 0])
        tensors = to_torch(torch, inputs, "cpu")
        update_by_operation(torch, case, tensors)
        for name, expected in zip("kv", update(inputs), strict=True):
            bits = tensors[f"{name}_cache"].view(torch.uint8).numpy()
            assert_same_bits(bits, expected.view(np.uint8).reshape(bits.shape))

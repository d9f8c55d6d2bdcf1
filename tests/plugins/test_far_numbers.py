"""Kernels over numbers that no caller hands them: TensorRT times tactics over arbitrary ones.

A read or a write that is led astray ends the interpreting process.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from dflash_plugins.block_attention.attention_inputs import attend
from dflash_plugins.block_attention.attention_inputs import make_inputs as attention_inputs
from dflash_plugins.gated_delta_step.checks import PLACES
from dflash_plugins.gated_delta_step.checks import make_inputs as recurrence_inputs
from dflash_plugins.gated_delta_step.launch import TACTICS
from dflash_plugins.gated_delta_step.launch import make_case as recurrence_case
from dflash_plugins.kv_cache_update.launch import make_case as update_case
from dflash_plugins.kv_caches import WriteShape
from dflash_plugins.kv_feature_injection.launch import make_case as injection_case
from dflash_plugins.operation import DType
from dflash_plugins.row_sample.launch import OPERATIONS as ROW_SAMPLE
from dflash_plugins.testing.cache_writes import make_inputs as write_inputs
from dflash_plugins.testing.numeric import Array

from dflash_trt.hardware.kernels import ONE_LAUNCH
from dflash_trt.models.sizes import RecurrentSizes
from dflash_trt.sampling.params import SamplingParams, pack_sampling
from tests.plugins.conftest import attention_shape
from tests.plugins.interpreter import Interpreter, assert_same_bits

FAR = 10**8


@pytest.mark.parametrize("length", [64, ONE_LAUNCH])
@pytest.mark.parametrize("page", [FAR, -FAR])
def test_attention_reads_no_page_outside_of_the_pool(
    interpreter: Interpreter, page: int, length: int
) -> None:
    shape = attention_shape(length=length, page_size=16)
    inputs = attention_inputs(shape, [40, 64])
    expected = attend(interpreter.run, shape, inputs)
    inputs["page_table"][0] = page
    assert_same_bits(attend(interpreter.run, shape, inputs)[1], expected[1])


@pytest.mark.parametrize("make_case", [update_case, injection_case])
@pytest.mark.parametrize("page", [FAR, 7, -FAR])
def test_rows_of_a_page_outside_of_the_pool_are_not_written(
    interpreter: Interpreter, make_case: type, page: int
) -> None:
    sizes = {"batch": 2, "rows": 4, "kv_heads": 2, "head_dim": 16, "length": 16, "page_size": 8}
    case = make_case(WriteShape(compute=DType.FLOAT16, pages=7, **sizes))
    inputs = write_inputs(case, [4, 0])
    found = []
    for missing in (-1, page):
        inputs["page_table"][0] = missing
        found.append(interpreter.run(case.operation.name, inputs, case.attributes))
    for name, one in found[0].items():
        assert_same_bits(found[1][name], one)


def test_a_position_past_the_angles_is_not_looked_up(interpreter: Interpreter) -> None:
    sizes = {"batch": 2, "rows": 4, "kv_heads": 2, "head_dim": 16, "length": 16}
    case = injection_case(WriteShape(compute=DType.FLOAT16, **sizes))
    inputs = write_inputs(case, [4, 0])
    expected = interpreter.run(case.operation.name, inputs, case.attributes)
    inputs["positions"][0, 1:] = [10**9, -(10**9), 16]
    found = interpreter.run(case.operation.name, inputs, case.attributes)
    assert_same_bits(found["v_cache_out"], expected["v_cache_out"])
    assert_same_bits(found["k_cache_out"][1], expected["k_cache_out"][1])


@pytest.mark.parametrize("tactic", TACTICS)
def test_a_recurrence_has_two_sides(interpreter: Interpreter, tactic: int) -> None:
    case = recurrence_case("", RecurrentSizes(1, 1, 16, 4), batch=2, count=3)
    inputs = recurrence_inputs(case, PLACES[2:4])
    inputs["side"][0] = 0
    expected = interpreter.run(case.operation.name, inputs, case.attributes, tactic)
    inputs["side"][0] = 10**6
    found = interpreter.run(case.operation.name, inputs, case.attributes, tactic)
    for name, one in expected.items():
        assert_same_bits(found[name], one)


def test_drawing_ends(interpreter: Interpreter) -> None:
    """And what is drawn of a sequence does not hang on what stands with it."""
    parameters = [SamplingParams(temperature=1.0, top_p=0.9, seed=seed) for seed in range(8)]
    generator = np.random.default_rng(0)
    known: dict[str, Array] = {
        "logits": generator.standard_normal((8, 1, 600)).astype(np.float32),
        "positions": np.arange(8)[:, None],
        "sampling": pack_sampling(parameters),
    }
    groups, sample = ROW_SAMPLE
    known |= interpreter.run(groups.name, {name: known[name] for name in groups.inputs})
    given = {name: known[name].copy() for name in sample.inputs}
    expected = interpreter.run(sample.name, given)["token_ids"]
    tops = np.array([0.0, -1.0, np.nan, np.inf], np.float64)
    given["sampling"][:4, 3] = tops.view(np.int64)
    given["peaks"][4], given["weights"][5], given["sampling"][6, 1] = -1e30, -1.0, -1
    found = interpreter.run(sample.name, given)["token_ids"]
    assert ((found >= -1) & (found < 600)).all()
    assert found[7] == expected[7]


HEADS, HEAD_DIM, PAGE_SIZE = 8, 128, 32
PAGES = 2**31 // (PAGE_SIZE * HEADS * HEAD_DIM) + 4
LENGTH = 2**31 // (HEADS * HEAD_DIM) + 128
FP8 = DType.FLOAT8.numpy
ROWS = 4


def codes(generator: np.random.Generator, *shape: int) -> Array:
    """Values that every rounding leaves alone."""
    return generator.choice([-4.0, -0.5, 2.0, 8.0], shape).astype(np.float32)


@pytest.mark.parametrize("is_paged", [False, True])
@pytest.mark.parametrize("name", ["kv_cache_update", "kv_feature_injection"])
def test_rows_are_written_past_2_31_elements(
    interpreter: Interpreter, name: str, is_paged: bool
) -> None:
    """The last page's last rows and then the first page's; the last rows of the last head."""
    from tests.plugins.interpreted import run_sparse

    generator = np.random.default_rng(0)
    injects = name == "kv_feature_injection"
    heads, length = (HEADS, LENGTH) if is_paged else (32 * HEADS, LENGTH // 32)
    shape = (1, ROWS, heads, HEAD_DIM) if injects else (1, heads, ROWS, HEAD_DIM)
    inputs: dict[str, Array] = {one: codes(generator, *shape) for one in "kv"}
    first = PAGE_SIZE - 2 if is_paged else length - ROWS
    positions = np.arange(first, first + ROWS)
    inputs["positions"] = positions[None]
    inputs["kv_scales"] = np.ones(2, np.float32)
    attributes: dict[str, Any] = {}
    if injects:
        inputs["k_norm"] = np.ones(HEAD_DIM, np.float32)
        table = np.zeros((first + ROWS, HEAD_DIM // 2), np.float32)
        inputs |= {"cos": table, "sin": table + np.float32(1)}
        attributes["epsilon"] = 1e-6
    cache: tuple[int, ...] = (1, heads, length, HEAD_DIM)
    places: list[Any] = [(0, slice(None), position) for position in positions]
    if is_paged:
        inputs["page_table"] = np.array([[PAGES - 1, 0]], np.int32)
        attributes["page_size"] = PAGE_SIZE
        cache = (PAGES, PAGE_SIZE, HEADS, HEAD_DIM)
        places = [(PAGES - 1, 30), (PAGES - 1, 31), (0, 0), (0, 1)]
    operation = f"{name}{'_paged' * is_paged}_fp8"
    outputs = interpreter.call(run_sparse, operation, inputs, attributes, cache, {}, places)
    by_row = {one: inputs[one][0] if injects else inputs[one][0].swapaxes(0, 1) for one in "kv"}
    assert_same_bits(outputs["v_cache_out"], by_row["v"].astype(FP8))
    if injects:
        assert outputs["k_cache_out"].astype(np.float32).all()
    else:
        assert_same_bits(outputs["k_cache_out"], by_row["k"].astype(FP8))


@pytest.mark.parametrize("form", ["", "_split"])
@pytest.mark.parametrize("is_paged", [False, True])
def test_attention_reads_past_2_31_elements(
    interpreter: Interpreter, is_paged: bool, form: str
) -> None:
    """What is there is attended as it is at the beginning of a small cache."""
    from tests.plugins.interpreted import run_sparse

    generator = np.random.default_rng(0)
    inputs: dict[str, Array] = {
        "q": generator.standard_normal((1, HEADS, ROWS, HEAD_DIM)).astype(np.float32),
        "kv_scales": np.array([0.05, 0.5], np.float32),
    }
    attributes = {"block_size": ROWS, "is_causal": 1, "window": 60}
    if form:
        attributes["most_splits"] = 1
    else:
        inputs["sinks"] = np.zeros(HEADS, np.float32)
    held = {one: codes(generator, 64, HEADS, HEAD_DIM).astype(FP8) for one in "kv"}
    found = []
    for length, pages in ((128, 4), (LENGTH, PAGES)):
        cache: tuple[int, ...] = (1, HEADS, length, HEAD_DIM)
        own = inputs | {"key_value_lengths": np.array([length], np.int32)}
        written: dict[str, Any] = {
            f"{one}_cache": ((0, slice(None), slice(length - 64, length)), rows.swapaxes(0, 1))
            for one, rows in held.items()
        }
        if is_paged:
            cache = (pages, PAGE_SIZE, HEADS, HEAD_DIM)
            own["key_value_lengths"] = np.array([64], np.int32)
            own["page_table"] = np.array([[pages - 2, pages - 1]], np.int32)
            written = {
                f"{one}_cache": (slice(pages - 2, pages), rows.reshape(2, *cache[1:]))
                for one, rows in held.items()
            }
        operation = f"block_attention{form}{'_paged' * is_paged}_fp8"
        found.append(interpreter.call(run_sparse, operation, own, attributes, cache, written, []))
    near, far = found
    for name in near:
        assert near[name].astype(bool).any()
        assert_same_bits(far[name], near[name])

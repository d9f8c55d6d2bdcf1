"""Kernels over numbers that no caller hands them: TensorRT times tactics over arbitrary ones.

A read or a write that is led astray ends the interpreting process.
"""

from __future__ import annotations

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

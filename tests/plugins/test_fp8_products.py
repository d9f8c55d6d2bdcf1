"""Attention whose products take FP8 codes: its two parts are about as good as bfloat16.

The interpreter multiplies such parts with float32 sums. What tensor cores sum waits for a GPU, so
no engine is offered the tactic.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from dflash_plugins.block_attention.accuracy import accuracy_cases, check_accuracy, trial_cases
from dflash_plugins.block_attention.cases import AttentionShape, main_cases
from dflash_plugins.block_attention.inputs import attend, expect, make_inputs
from dflash_plugins.block_attention.launch import BLOCK, FP8, OPERATIONS
from dflash_plugins.block_attention.reference import KERNEL_PARTS, error_bound
from dflash_plugins.compile import compile_kernel, reassemble
from dflash_plugins.operation import Case, DType
from dflash_plugins.sass import read_sass
from dflash_plugins.testing.interpreter import Interpreter
from dflash_plugins.testing.numeric import Array, assert_close

from dflash_trt.errors import DflashError
from dflash_trt.hardware.kernels import ONE_LAUNCH, RUN, kernel_arches
from tests.covering import exhaustive
from tests.plugins.conftest import attention_shape

NEWEST = {
    "sm_90a": {"QGMMA", "HGMMA"},
    "sm_100a": {"UTCQMMA"},
    "sm_103a": {"UTCQMMA"},
    "sm_120a": {"QMMA"},
}
"""Of each architecture, what multiplies FP8, and V where it stays in 16 bits."""


def shaped(*sizes: int, **form: object) -> AttentionShape:
    """A small attention over FP8 caches; queries are float32."""
    return attention_shape(*sizes, cache=DType.FLOAT8, **form)


@pytest.mark.numeric
@pytest.mark.parametrize(
    ("shape", "lengths"),
    [
        (shaped(8, 1, 64, 150, page_size=24, window=20, is_causal=True), [4, 65, 150]),
        (shaped(2, 1, 128, ONE_LAUNCH), [RUN + 20]),
        exhaustive(shaped(4, 2, 64, 96, compute=DType.FLOAT16), [96, 4]),
    ],
)
def test_two_parts_are_within_their_bound(
    interpreter: Interpreter, shape: AttentionShape, lengths: list[int]
) -> None:
    """Rows of very different sizes too, and one that is zero."""
    inputs = make_inputs(shape, lengths, has_sinks=True)
    inputs["q"][:, 0] *= 2.0**-12
    inputs["q"][:, -1, -1] = 0
    attended = attend(partial(interpreter.run, tactic=FP8), shape, inputs)
    expected = expect(shape, inputs)
    assert_close(attended, expected, error_bound(shape, inputs, expected, KERNEL_PARTS))


@pytest.mark.numeric
@pytest.mark.parametrize("name", ["q", "weights"])
def test_the_bound_sees_one_part_alone(name: str) -> None:
    """Of q's rows; or of the weights, as a sum of v in which each has the error of one part."""
    shape = shaped(4, 1, 128, 96)
    inputs = make_inputs(shape, [96])
    expected = expect(shape, inputs)
    bound = error_bound(shape, inputs, expected, KERNEL_PARTS)
    wrong = inputs | {"q": one_part(inputs["q"])}
    if name == "weights":
        q, k, v = (inputs[one].astype(np.float64) for one in ("q", "k_cache", "v_cache"))
        k_scale, v_scale = inputs["kv_scales"]
        scores = q @ k.swapaxes(2, 3) * k_scale
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        attended = one_part(weights) @ v * v_scale / weights.sum(-1, keepdims=True)
    else:
        attended = expect(shape, wrong)
    with pytest.raises(AssertionError, match="first at"):
        assert_close(attended, expected, bound)


def one_part(rows: Array) -> Array:
    """`rows` rounded to E4M3, scaled by the largest number of each."""
    scale = 256 / np.abs(rows).max(-1, keepdims=True)
    return (rows * scale).astype(ml_dtypes.float8_e4m3fn).astype(rows.dtype) / scale


def test_only_fp8_caches_have_the_tactic_and_engines_are_not_offered_it() -> None:
    for operation in OPERATIONS:
        has_codes = "kv_scales" in operation.inputs
        assert operation.trial == ((FP8,) if has_codes else ())
        assert FP8 not in operation.offered
        assert has_codes == (FP8 in range(operation.tactics))


def test_the_check_tries_it_last_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that refuses every kernel: the findings of what is on trial are apart."""

    def refuse(*given: object, **options: object) -> dict[str, Array]:
        raise DflashError("no kernel image is available")

    monkeypatch.setattr("dflash_plugins.block_attention.accuracy.make_inputs", lambda *a, **k: {})
    monkeypatch.setattr("dflash_plugins.block_attention.accuracy.check_bits", lambda run: [])
    monkeypatch.setattr("dflash_plugins.block_attention.accuracy.attend", refuse)
    found = list(check_accuracy(refuse))
    offered, trial = len(accuracy_cases()), len(trial_cases())
    assert [one.is_trial for one in found] == [False] * offered + [True] * trial
    assert all(one.mismatch == "no kernel image is available" for one in found)
    assert all(one.name.endswith("tactic 5 on trial") == one.is_trial for one in found)


def compilations() -> Iterator[object]:
    for arch in kernel_arches():
        for case in main_cases():
            if case.operation.trial and case.kernel_spec(FP8) != case.kernel_spec(BLOCK):
                is_first = case.name == "qwen3-8b target paged fp8"
                marks = [pytest.mark.exhaustive] + [pytest.mark.full] * (not is_first)
                yield pytest.param(case, arch, marks=marks, id=f"{case.name}-{arch}")


@pytest.mark.parametrize(("case", "arch"), compilations())
def test_products_run_on_codes(case: Case, arch: str, kernels: Path) -> None:
    """Without spills. K stays as it is; V becomes bfloat16 for sm_90a alone."""
    kernel, converting = (
        compile_kernel(case.kernel_spec(tactic), arch, kernels) for tactic in (FP8, BLOCK)
    )
    assert kernel.resources.spilled_bytes == kernel.resources.stack_bytes == 0
    assert all(took["spilled_bytes"] == 0 for took in reassemble(kernel).values())
    facts = read_sass(kernel.cubin)
    if facts is None:
        pytest.skip("its instructions: nvidia-cuda-nvdisasm (the test extra) is not installed")
    assert facts.local_accesses == 0 < facts.asynchronous_copies
    kinds = {name.partition(".")[0] for name in facts.mma}
    codes, numbers = (one.ptx.count("cvt.bf16.f16") for one in (kernel, converting))
    assert kinds == NEWEST[arch]
    assert 0 < codes <= numbers // 2 if arch == "sm_90a" else codes == 0 < numbers

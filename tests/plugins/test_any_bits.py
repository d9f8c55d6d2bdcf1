"""Kernels over any bits: TensorRT times tactics over memory that nobody has filled for them.

Interpreted under a watch (interpreter.py): each access is within a tensor, no program goes on for
ever, and inputs stay as they are. The seeds are fixed, so a run is like any other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from dflash_plugins.accept.launch import OPERATIONS as ACCEPT
from dflash_plugins.block_attention.cases import AttentionShape, make_cases
from dflash_plugins.gated_delta_step.launch import TACTICS
from dflash_plugins.gated_delta_step.launch import make_case as recurrence_case
from dflash_plugins.kv_cache_update.launch import make_case as update_case
from dflash_plugins.kv_caches import WriteShape
from dflash_plugins.kv_feature_injection.launch import make_case as injection_case
from dflash_plugins.operation import Case, DType, TensorSpec
from dflash_plugins.row_sample.launch import OPERATIONS as ROW_SAMPLE
from dflash_plugins.table import operations
from dflash_plugins.testing.numeric import Array

from dflash_trt.models.sizes import RecurrentSizes
from tests.covering import exhaustive
from tests.plugins.interpreter import Interpreter

SEEDS = 40
INTEGERS = (-1, 0, 1, 2, 17, 10**6, 10**8, -(10**8), 2**31 - 1, -(2**31), 2**62, -(2**63))
FLOATS = (np.nan, np.inf, -np.inf, 6e4, -6e4, 0.0, -0.0, 1e-40, 1.0, -1.0)
TOPS = (-1.0, 0.0, np.nan, np.inf, 1e-300, 0.5, 1.0, 2.0)
"""What stands as top-p, in float64's bits, beside temperatures of the same kind."""

WRITES = {"batch": 2, "rows": 3, "kv_heads": 2, "head_dim": 16, "length": 16}
CACHES: dict[str, dict[str, Any]] = {
    "": {},
    " paged": {"page_size": 8, "pages": 5},
    " fp8": {"cache": DType.FLOAT8},
    " paged fp8": {"page_size": 8, "pages": 5, "cache": DType.FLOAT8},
}


def cases() -> dict[str, tuple[Case, int]]:
    """Each operation in each form, small, by name, with a tactic."""
    found: dict[str, tuple[Case, int]] = {}
    for form, more in CACHES.items():
        shape = WriteShape(compute=DType.FLOAT16, **WRITES, **more)
        if form:  # plain caches TensorRT writes
            found[f"update{form}"] = update_case(shape), 0
        found[f"injection{form}"] = injection_case(shape), 0
        own = {"cache": DType.FLOAT16} | {n: more[n] for n in more if n != "pages"}
        plain = AttentionShape(4, 2, 64, 64, block_size=4, compute=DType.FLOAT16, **own)
        found[f"attention{form}"] = make_cases("", plain, batch=2)[0], 0
        split, merge = make_cases("", replace(plain, length=1024, window=0), batch=1)
        found[f"split{form}"] = split, 0
        causal = replace(plain, is_causal=True, window=5)
        found[f"window{form}"] = make_cases("", causal, batch=2)[0], 0
    found["merge"] = merge, 0
    for tactic in TACTICS:
        sizes = RecurrentSizes(1, 1, 16, 4)
        found[f"recurrence {tactic}"] = recurrence_case("", sizes, batch=2, count=3), tactic
    ids = TensorSpec(DType.INT64, (2, 4))
    starts = TensorSpec(DType.INT64, (2,))
    given = {"token_ids": ids, "choice_ids": ids, "cache_start": starts}
    found["accept"] = Case("", ACCEPT[0], given), 0
    groups, sample = ROW_SAMPLE
    logits = TensorSpec(DType.FLOAT32, (2, 1, 600))
    drawn = {"logits": logits, "sampling": TensorSpec(DType.INT64, (2, 4))}
    found["groups"] = Case("", groups, drawn), 0
    peaks = TensorSpec(DType.FLOAT32, (2, 1, 3))
    more = {"positions": TensorSpec(DType.INT64, (2, 1)), "peaks": peaks, "weights": peaks}
    found["sample"] = Case("", sample, drawn | more), 0
    return found


def any_bits(case: Case, seed: int) -> dict[str, Array]:
    """Inputs of random bits, of one number throughout, or of numbers in any order.

    Of every other seed one integer input alone, in turn, and floats are what they may be in half of
    these: what is led astray by one input is seen with others that lead there.
    """
    generator, found = np.random.default_rng(seed), dict[str, Array]()
    specs = {name: case.inputs[name] for name in case.operation.inputs}
    integers = [name for name, spec in specs.items() if spec.dtype.numpy.kind == "i"]
    is_alone = seed % 2 == 0 and bool(integers)
    for name, spec in specs.items():
        kind = spec.dtype.numpy
        if name in integers:
            numbers = np.array([one for one in INTEGERS if fits(one, kind)])
            is_legal = is_alone and name != integers[seed // 2 % len(integers)]
            legal = generator.integers(0, 4, spec.shape)
        else:
            numbers, is_legal = np.array(FLOATS), is_alone and seed % 4 < 2
            legal = generator.standard_normal(spec.shape)
        way = generator.integers(3)
        if is_legal:
            found[name] = legal.astype(kind)
        elif way == 0:
            raw = np.frombuffer(generator.bytes(spec.nbytes), np.uint8)
            found[name] = raw.view(kind).reshape(spec.shape)
        else:
            chosen = generator.integers(len(numbers), size=() if way == 1 else spec.shape)
            found[name] = np.broadcast_to(numbers[chosen], spec.shape).astype(kind)
    if "sampling" in found and seed % 2:
        tops = np.array(TOPS)[generator.integers(len(TOPS), size=(2, 2))]
        found["sampling"] = found["sampling"].copy()
        found["sampling"][:, [1, 3]] = tops.view(np.int64)
        found["sampling"][:, 2] = generator.integers(-1, 3, 2)
    return found


def fits(number: int, kind: Any) -> bool:
    info = np.iinfo(kind)
    return info.min <= number <= info.max


CASES = cases()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("rest", [False, exhaustive(True)], ids=["few", "rest"])
def test_no_bits_lead_a_kernel_astray(interpreter: Interpreter, name: str, rest: bool) -> None:
    case, tactic = CASES[name]
    # Pages come third; kernels that are quick meet far ones every day.
    daily = 3 if name.startswith(("update", "attention paged")) else 1
    for seed in range(daily, SEEDS) if rest else range(daily):
        try:
            found = interpreter.run(
                case.operation.name, any_bits(case, seed), case.attributes, tactic
            )
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        check_tokens(found)


def check_tokens(found: Mapping[str, Array]) -> None:
    """A token that is drawn is one of the vocabulary, or none."""
    if "token_ids" in found:
        assert ((found["token_ids"] >= -1) & (found["token_ids"] < 600)).all()


def test_every_operation_is_among_them() -> None:
    assert {case.operation.name for case, _ in CASES.values()} == set(operations())

"""The operations of `row_sample` and their launches: `row_groups`, then `row_sample`."""

from __future__ import annotations

from collections.abc import Mapping

from dflash_plugins.operation import (
    Attributes,
    Case,
    DType,
    Launch,
    Operation,
    Specs,
    TensorSpec,
    fixed,
    next_power_of_two,
)
from dflash_plugins.public import public_pairs
from dflash_trt.hardware.kernels import Extent
from dflash_trt.sampling.noise import GROUP

TILE_GROUPS = 16
"""Groups of tokens that a program of `row_groups` reads."""

OPENED_BYTES = 4096
"""Of groups that `row_sample` opens at a time: more of them at once take too many registers."""

FURTHEST_SPAN, FURTHEST_HALVINGS = 16.0, 8
"""Where it looks for as many groups whose tokens may get furthest: so far, with noise, behind the
furthest, by so many halvings.
"""

KEY_BITS = {DType.FLOAT32: 32, DType.FLOAT16: 19, DType.BFLOAT16: 16}
"""How many upper bits of a float32 hold every value of the type: sign, exponent and mantissa.

The search for top-k bisects over keys of so many bits.
"""


def opened_groups(dtype: DType) -> int:
    """Groups of logits of a type that `row_sample` opens at a time."""
    return OPENED_BYTES // (GROUP * dtype.numpy.itemsize)


def _describe_groups(specs: Specs, attributes: Attributes) -> Mapping[str, TensorSpec]:
    groups = TensorSpec(DType.FLOAT32, _group_shape(specs))
    return {"peaks": groups, "weights": groups}


def _describe(specs: Specs, attributes: Attributes) -> Mapping[str, TensorSpec]:
    tokens = TensorSpec(DType.INT64, specs["positions"].shape)
    return {"token_ids": tokens, "listed": TensorSpec(DType.INT32, _group_shape(specs))}


def _group_shape(specs: Specs) -> tuple[Extent, ...]:
    batch, rows, vocabulary = specs["logits"].shape
    return (batch, rows, (vocabulary + (GROUP - 1)) // GROUP)


def _launch_groups(specs: Specs, attributes: Attributes, tactic: int) -> Launch:
    batch, rows, vocabulary = specs["logits"].shape
    size = fixed(vocabulary, "the vocabulary")
    return Launch(
        grid=(-(-size // (TILE_GROUPS * GROUP)), batch * rows, 1),
        extras=(rows,),
        constants={"VOCABULARY": size, "TILE_GROUPS": TILE_GROUPS},
        warps=8,
        stages=1,
    )


def _launch(specs: Specs, attributes: Attributes, tactic: int) -> Launch:
    batch, rows, vocabulary = specs["logits"].shape
    size, dtype = fixed(vocabulary, "the vocabulary"), specs["logits"].dtype
    return Launch(
        grid=(batch * rows, 1, 1),
        extras=(rows,),
        constants={
            "VOCABULARY": size,
            "GROUPS": next_power_of_two(-(-size // GROUP)),
            "OPENED": opened_groups(dtype),
            "KEY_BITS": KEY_BITS[dtype],
        },
        # With 8, float32 takes a few registers more than fit twice, and ptxas spills.
        warps=4 if dtype is DType.FLOAT32 else 8,
        stages=1,
    )


OPERATIONS = (
    Operation(
        name="row_groups",
        kernel="row_groups",
        inputs=("logits", "sampling"),
        extras=("rows",),
        outputs=("peaks", "weights"),
        describe=_describe_groups,
        launch=_launch_groups,
    ),
    Operation(
        name="row_sample",
        kernel="row_sample",
        inputs=("logits", "positions", "sampling", "peaks", "weights"),
        extras=("rows",),
        outputs=("token_ids", "listed"),
        describe=_describe,
        launch=_launch,
    ),
)
"""In the order in which they run: an engine has both where its graph has `row_sample`."""


def make_cases(name: str, *, dtype: DType, batch: int, rows: int, vocabulary: int) -> list[Case]:
    """Both launches for `rows` rows of `vocabulary` logits for each of `batch` sequences."""
    known = {
        "logits": TensorSpec(dtype, (batch, rows, vocabulary)),
        "positions": TensorSpec(DType.INT64, (batch, rows)),
        "sampling": TensorSpec(DType.INT64, (batch, 4)),
    }
    cases = []
    for operation in OPERATIONS:
        case = Case(name, operation, {one: known[one] for one in operation.inputs})
        known |= case.outputs
        cases.append(case)
    return cases


def main_cases() -> list[Case]:
    """Logits of Qwen3-8B as engines compute them, and float32 ones of more tokens than any has."""
    sizes = {"batch": 8, "rows": 8, "vocabulary": public_pairs()["qwen3-8b"].target.vocab}
    return [
        *make_cases("qwen3-8b bf16", dtype=DType.BFLOAT16, **sizes),
        *make_cases("qwen3-8b fp16", dtype=DType.FLOAT16, **sizes),
        *make_cases("largest fp32", dtype=DType.FLOAT32, **sizes | {"vocabulary": 262_144}),
    ]

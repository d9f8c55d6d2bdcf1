"""How `row_sample` is launched: a block per row of logits."""

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

TILE = 4096
"""Tokens that a block looks at together, at most."""

# The upper bits of a logit's float32 form that tell it from others: sign, exponent, mantissa.
# What a row is searched for takes a pass over it per bit, so narrow logits are drawn from faster.
_KEY_BITS = {DType.FLOAT32: 32, DType.FLOAT16: 19, DType.BFLOAT16: 16}


def _describe(specs: Specs, attributes: Attributes) -> Mapping[str, TensorSpec]:
    return {"token_ids": TensorSpec(DType.INT64, specs["positions"].shape)}


def _launch(specs: Specs, attributes: Attributes, tactic: int) -> Launch:
    batch, rows, vocabulary = specs["logits"].shape
    size = fixed(vocabulary, "the vocabulary")
    return Launch(
        grid=(batch * rows, 1, 1),
        extras=(rows,),
        constants={
            "VOCABULARY": size,
            "BLOCK": min(TILE, max(16, next_power_of_two(size))),
            "KEY_BITS": _KEY_BITS[specs["logits"].dtype],
        },
        warps=8,
        stages=2,
    )


OPERATIONS = (
    Operation(
        name="row_sample",
        kernel="row_sample",
        inputs=("logits", "positions", "sampling"),
        extras=("rows",),
        outputs=("token_ids",),
        describe=_describe,
        launch=_launch,
    ),
)


def make_case(name: str, *, dtype: DType, batch: int, rows: int, vocabulary: int) -> Case:
    """`rows` rows of logits of `batch` sequences."""
    inputs = {
        "logits": TensorSpec(dtype, (batch, rows, vocabulary)),
        "positions": TensorSpec(DType.INT64, (batch, rows)),
        "sampling": TensorSpec(DType.INT64, (batch, 4)),
    }
    return Case(name, OPERATIONS[0], inputs)


def main_cases() -> list[Case]:
    """Logits as an engine computes them, and as float32 over the largest vocabulary in use."""
    return [
        make_case("qwen3-8b bf16", dtype=DType.BFLOAT16, batch=8, rows=8, vocabulary=151_936),
        make_case("largest fp32", dtype=DType.FLOAT32, batch=8, rows=8, vocabulary=262_144),
    ]

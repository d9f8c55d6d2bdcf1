"""The launch of `row_sample`: one program per row of logits."""

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

TILE = 4096
"""Logits that a program loads at a time, at most."""
SMALLEST_TILE = 512
"""Two groups of tokens, whose words Philox gives together (dflash_trt/sampling/noise.py)."""

# How many upper bits of a float32 hold every value of the type: sign, exponent and mantissa.
# The searches for top-k and top-p bisect over keys, one pass over the row per bit.
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
            "BLOCK": min(TILE, max(SMALLEST_TILE, next_power_of_two(size))),
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
    """`rows` rows of `vocabulary` logits for each of `batch` sequences."""
    inputs = {
        "logits": TensorSpec(dtype, (batch, rows, vocabulary)),
        "positions": TensorSpec(DType.INT64, (batch, rows)),
        "sampling": TensorSpec(DType.INT64, (batch, 4)),
    }
    return Case(name, OPERATIONS[0], inputs)


def main_cases() -> list[Case]:
    """bf16 logits of Qwen3-8B, and float32 logits of a vocabulary larger than any public pair's."""
    vocabulary = public_pairs()["qwen3-8b"].target.vocab
    return [
        make_case("qwen3-8b bf16", dtype=DType.BFLOAT16, batch=8, rows=8, vocabulary=vocabulary),
        make_case("largest fp32", dtype=DType.FLOAT32, batch=8, rows=8, vocabulary=262_144),
    ]

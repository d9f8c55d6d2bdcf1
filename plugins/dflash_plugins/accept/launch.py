"""The launch of `accept`: one program per sequence."""

from __future__ import annotations

from collections.abc import Mapping

from dflash_plugins.operation import Attributes, Case, DType, Launch, Operation, Specs, TensorSpec
from dflash_trt.hardware.kernels import MAX_ROWS


def _describe(specs: Specs, attributes: Attributes) -> Mapping[str, TensorSpec]:
    batch, rows = specs["token_ids"].shape
    return {
        "accepted": TensorSpec(DType.INT32, (batch,)),
        "new_tokens": TensorSpec(DType.INT64, (batch, rows)),
        "bonus": TensorSpec(DType.INT64, (batch,)),
        "new_start": TensorSpec(DType.INT64, (batch,)),
    }


def _launch(specs: Specs, attributes: Attributes, tactic: int) -> Launch:
    batch, rows = specs["token_ids"].shape
    return Launch(grid=(batch, 1, 1), extras=(rows,), constants={"BLOCK": MAX_ROWS}, warps=1)


OPERATIONS = (
    Operation(
        name="accept",
        kernel="accept",
        inputs=("token_ids", "choice_ids", "cache_start"),
        extras=("rows",),
        outputs=("accepted", "new_tokens", "bonus", "new_start"),
        describe=_describe,
        launch=_launch,
    ),
)


def make_case(name: str, *, batch: int, rows: int) -> Case:
    """A verify step of `rows` rows (1 … MAX_ROWS) for each of `batch` sequences."""
    block = TensorSpec(DType.INT64, (batch, rows))
    inputs = {
        "token_ids": block,
        "choice_ids": block,
        "cache_start": TensorSpec(DType.INT64, (batch,)),
    }
    return Case(name, OPERATIONS[0], inputs)


def main_cases() -> list[Case]:
    """One case: the machine code is the same for every batch and block size."""
    return [make_case("64 blocks of 16", batch=64, rows=16)]

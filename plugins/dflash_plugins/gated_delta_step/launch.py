"""The launch of `gated_delta_step`: a program for some columns of a value head's state.

Tactic 0 goes row by row. Tactic 1 takes CHUNK rows at once, of blocks as of prompts: their
products are matrices', and what they wait for, they wait for together. It rounds otherwise. Rows
that may be taken back must be one chunk; where they are more, both tactics go row by row.
"""

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
from dflash_plugins.public import recurrences
from dflash_trt.errors import DflashError
from dflash_trt.hardware.kernels import MOST_TAPS, RECURRENT_HEAD_DIMS, SIDES
from dflash_trt.models.sizes import RecurrentSizes

TACTICS = STEP, CHUNKS = range(2)

COLUMNS, WARPS = (64, 128), (8, 8)
"""Of a program, by tactic: 128 rows of 64 columns are 32 registers a thread, and all warps share a
row of q and k, which a program for fewer columns would have to itself. By chunks the state passes
through in slices, so a program has a whole head's, and a head's rows are convolved once."""

CHUNK, SLICE, UPDATED = 16, 64, 32
"""Rows of a chunk; rows of a state that are multiplied, and that are updated, at a time. Two slices
of 64 have half the waits of four, but in the update they take 51 KB of shared memory."""


def _describe(specs: Specs, attributes: Attributes) -> Mapping[str, TensorSpec]:
    new_rows, (_, heads, size, _) = specs["new_rows"], specs["state"].shape
    batch, count, _ = new_rows.shape
    return {"y": TensorSpec(new_rows.dtype, (batch, count, heads * size))}


def _launch(specs: Specs, attributes: Attributes, tactic: int) -> Launch:
    batch, count, _ = specs["new_rows"].shape
    heads = fixed(specs["state"].shape[1], "the number of value heads")
    size = fixed(specs["state"].shape[2], "the head size")
    channels = fixed(specs["kernel"].shape[0], "the number of channels")
    taps = fixed(specs["kernel"].shape[2], "the convolution's length")
    held = fixed(specs["rows"].shape[2], "the number of rows that are kept")
    key_heads = (channels // size - heads) // 2
    if size not in RECURRENT_HEAD_DIMS:
        known = ", ".join(map(str, RECURRENT_HEAD_DIMS))
        raise DflashError(f"gated_delta_step has no kernel for head size {size}, only {known}")
    if taps > MOST_TAPS:
        raise DflashError(f"gated_delta_step convolves up to {MOST_TAPS} rows, not {taps}")
    if attributes["replay"] > CHUNK:
        tactic = STEP  # a state between two chunks of open rows has no place: state_out is settled
    columns = min(COLUMNS[tactic], size)
    return Launch(
        grid=(heads * size // columns, batch, 1),
        extras=(count,),
        constants={
            "KEY_HEADS": key_heads,
            "VALUE_HEADS": heads,
            "HEAD_DIM": size,
            "TAPS": taps,
            "HELD": held,
            "REPLAY": attributes["replay"],
            "HELD_BLOCK": next_power_of_two(held),
            "COLUMNS": columns,
            "CHUNK": CHUNK if tactic == CHUNKS else 1,
            "SLICE": min(SLICE, size),
            "UPDATED": min(UPDATED, size),
        },
        warps=WARPS[tactic],
        stages=1,
    )


INPUTS = "new_rows kernel time_bias decay rows state start state_start rows_end side"

OPERATIONS = (
    Operation(
        name="gated_delta_step",
        kernel="gated_delta_step",
        inputs=tuple(INPUTS.split()),
        extras=("count",),
        outputs=("y", "state_out", "rows_out"),
        aliases={"state_out": "state", "rows_out": "rows"},
        attributes={"replay": int},
        describe=_describe,
        launch=_launch,
        tactics=len(TACTICS),
    ),
)


def make_case(
    name: str,
    sizes: RecurrentSizes,
    *,
    batch: int,
    count: int,
    replay: int = 16,
    held: int | None = None,
    dtype: DType = DType.FLOAT32,
) -> Case:
    """`count` rows of `dtype` a sequence; a later call may take back `replay` of them.

    Of those before a call `held` are kept, by default what is replayed and convolved.
    """
    width, heads = sizes.row_elements, sizes.value_heads
    places = TensorSpec(DType.INT64, (batch,))
    held = held or replay + sizes.kernel - 1
    inputs = {
        "new_rows": TensorSpec(dtype, (batch, count, width)),
        "kernel": TensorSpec(DType.FLOAT32, (sizes.channels, 1, sizes.kernel)),
        "time_bias": TensorSpec(DType.FLOAT32, (heads,)),
        "decay": TensorSpec(DType.FLOAT32, (heads,)),
        "rows": TensorSpec(DType.FLOAT32, (batch, SIDES, held, width)),
        "state": TensorSpec(DType.FLOAT32, (batch, heads, sizes.head_dim, sizes.head_dim)),
        **dict.fromkeys(("start", "state_start", "rows_end", "side"), places),
    }
    return Case(name, OPERATIONS[0], inputs, {"replay": replay})


def main_cases() -> list[Case]:
    """The heads of every public hybrid, the most first; and rows in bfloat16."""
    names = {sizes: name for name, sizes in recurrences().items()}
    found = sorted(names, key=lambda one: -one.value_heads)
    cases = [make_case(names[sizes], sizes, batch=8, count=16) for sizes in found]
    sizes, name = found[0], names[found[0]]
    return [*cases, make_case(f"{name} bf16", sizes, batch=8, count=16, dtype=DType.BFLOAT16)]

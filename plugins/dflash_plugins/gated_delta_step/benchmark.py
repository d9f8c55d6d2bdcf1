"""`gated_delta_step` on a GPU: steps and prompts' chunks with the heads of public hybrids."""

from __future__ import annotations

from typing import Any

from dflash_plugins.gated_delta_step.accuracy import Place, make_inputs
from dflash_plugins.gated_delta_step.launch import CHUNKS, make_case
from dflash_plugins.operation import Case, DType
from dflash_plugins.public import recurrences
from dflash_plugins.testing.gpu import TorchRunner

ROWS = ((1, 1), (1, 16), (8, 16), (64, 16), (1, 512))
"""(Sequences, rows of each): a plain step, verify steps, a prefill chunk."""
PENDING = 6
"""Rows that a verify step runs again: those that a public draft has accepted."""


def points() -> list[Case]:
    """Every public hybrid's heads, with rows in bfloat16."""
    return [
        make_case(
            f"{name}, {batch} × {count} rows", sizes, batch=batch, count=count, dtype=DType.BFLOAT16
        )
        for name, sizes in recurrences().items()
        for batch, count in ROWS
    ]


def moved_bytes(case: Case) -> int:
    """The state, read and written; of old rows one side read and one written; the call's rows."""
    kept = 2 * case.inputs["state"].nbytes + case.inputs["rows"].nbytes
    return kept + case.inputs["new_rows"].nbytes + case.outputs["y"].nbytes


def measure(torch: Any, case: Case, runner: TorchRunner) -> dict[str, Any]:
    """Seconds row by row, and by chunks. PyTorch has no such operation."""
    batch, count, _ = case.inputs["new_rows"].shape
    held = case.inputs["rows"].shape[2]
    pending = PENDING if count > 1 else 1
    tensors = runner.upload(make_inputs(case, [Place(count + held, pending)] * batch))
    by_chunks, _ = runner.prepare(case, tensors, CHUNKS)
    return runner.measure(case, tensors, {"by chunks": by_chunks}, moved_bytes(case))

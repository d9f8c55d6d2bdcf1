"""`gated_delta_step` as work: a state that is read and written once, and rows one after the other.

A program holds some columns of a value head's state. Its tiles are rows, or chunks of them: their
few channels come from the L2 cache, as all programs read them, and each waits for the one before.
So what a tile waits for counts as a load's latency, and only its instructions are shared with the
other programs of an SM. Those are counted in the machine code, which has thrice as many for a row
as its source seems to.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any

from dflash_plugins.compile import compile_kernel
from dflash_plugins.gated_delta_step.benchmark import PENDING, moved_bytes
from dflash_plugins.gated_delta_step.launch import CHUNK, CHUNKS, STEP, make_case
from dflash_plugins.operation import Case, DType
from dflash_plugins.public import recurrences
from dflash_plugins.roofline.model import (
    LaunchWork,
    PredictedTime,
    kernel_residency,
    predict,
)
from dflash_plugins.roofline.rates import GpuRates, read_constants

ROWS = 16
"""Of a verify step, as public drafts' blocks have them."""


PART_PRODUCTS = 6
"""Of parts of bfloat16, for one product of float32."""


def predict_recurrence(
    case: Case, rates: GpuRates, folder: Path, tactic: int | None = None
) -> PredictedTime:
    """The time of a call by a tactic, or by the faster one, which TensorRT takes.

    A verify step runs PENDING rows again.
    """
    if tactic is None:
        found = (predict_recurrence(case, rates, folder, one) for one in (STEP, CHUNKS))
        return min(found, key=lambda one: one.seconds)
    predictor = _by_chunks if tactic == CHUNKS else _by_rows
    return predictor(case, rates, folder)


def _by_rows(case: Case, rates: GpuRates, folder: Path) -> PredictedTime:
    kernel = compile_kernel(case.kernel_spec(STEP), rates.kernels, folder)
    launch, constants = case.launch(STEP), read_constants()
    sizes: dict[str, Any] = dict(launch.constants)
    _, count, _ = case.inputs["new_rows"].shape
    programs = launch.grid[0] * launch.grid[1]
    channels, columns = 2 * sizes["HEAD_DIM"], sizes["COLUMNS"]
    instructions = constants["state_row_instructions"].value * kernel.threads
    seconds = instructions / rates.lanes
    waiting = replace(rates, l2_latency=rates.l2_latency + rates.tile_latency)
    state, held = case.inputs["state"], case.inputs["rows"]
    work = LaunchWork(
        name=case.operation.name,
        groups=((programs, count + (PENDING if count > 1 else 1)),),
        tile_bytes=(channels + columns) * case.inputs["new_rows"].dtype.numpy.itemsize,
        buffers=1,
        tile_seconds=seconds,
        resident=kernel_residency(kernel, rates),
        # Three positions at once, then the state; it and the kept rows pass at the memory's rate.
        cached_loads=1 + ceil(rates.memory_latency / waiting.l2_latency),
        is_cached=True,
        written_bytes=2 * state.nbytes + held.nbytes,
        is_written_cached=False,
    )
    return predict((work,), moved_bytes(case), waiting)


def _by_chunks(case: Case, rates: GpuRates, folder: Path) -> PredictedTime:
    """One chunk settles what a call left and has no outputs; the last changes no state.

    Figures of a chunk are those of both kinds on average.
    """
    kernel = compile_kernel(case.kernel_spec(CHUNKS), rates.kernels, folder)
    launch, constants = case.launch(CHUNKS), read_constants()
    sizes: dict[str, Any] = dict(launch.constants)
    _, count, _ = case.inputs["new_rows"].shape
    size, columns = sizes["HEAD_DIM"], sizes["COLUMNS"]
    instructions = constants["chunk_instructions"].value * kernel.threads
    elements = 2 * size * columns + 1.5 * CHUNK * (size + columns)
    products = PART_PRODUCTS * 2 * CHUNK * elements
    waits = constants["chunk_steps"].value / constants["tile_steps"].value * rates.tile_latency
    waits += constants["chunk_loads"].value * rates.l2_latency + rates.memory_latency
    waiting = replace(rates, l2_latency=waits)
    state, held = case.inputs["state"], case.inputs["rows"]
    rows = CHUNK * (2 * size + columns) * case.inputs["new_rows"].dtype.numpy.itemsize
    work = LaunchWork(
        name=case.operation.name,
        groups=((launch.grid[0] * launch.grid[1], 1 + ceil(count / CHUNK)),),
        # The state is read again, from the L2 cache.
        tile_bytes=size * columns * state.dtype.numpy.itemsize + rows,
        buffers=1,
        tile_seconds=max(instructions / rates.lanes, products / rates.products),
        resident=kernel_residency(kernel, rates),
        cached_loads=0,
        is_cached=True,
        written_bytes=2 * state.nbytes + held.nbytes,
        is_written_cached=False,
    )
    return predict((work,), moved_bytes(case), waiting)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrenceCell:
    """`gated_delta_step` of one layer of a public hybrid, in a verify step of a batch."""

    rates: GpuRates
    target: str
    batch: int
    time: PredictedTime

    def as_json(self) -> dict[str, Any]:
        return {
            "kernel": "gated_delta_step",
            "gpu": self.rates.name,
            "target": self.target,
            "batch": self.batch,
            "rows": ROWS,
            "required_bytes": self.time.required_bytes,
            "predicted_seconds": self.time.seconds,
            "predicted_share": self.time.share(self.rates),
            "limit": self.time.limit,
        }


def recurrence_cells(
    rates: GpuRates, batches: Sequence[int], folder: Path
) -> Iterator[RecurrenceCell]:
    """A verify step of every batch for the layers of each public hybrid."""
    for target, sizes in recurrences().items():
        for batch in batches:
            case = make_case("", sizes, batch=batch, count=ROWS, dtype=DType.BFLOAT16)
            time = predict_recurrence(case, rates, folder)
            yield RecurrenceCell(rates=rates, target=target, batch=batch, time=time)


def describe_recurrences(cells: Sequence[RecurrenceCell]) -> Iterator[str]:
    """A line for each hybrid of one GPU: µs of a layer, and the share of the bandwidth."""
    batches = list(dict.fromkeys(cell.batch for cell in cells))
    yield f"gated_delta_step, {cells[0].rates.title}, {ROWS} rows: predictions"
    yield f"  {'':18}" + "".join(f"{f'batch {batch}':>30}" for batch in batches)
    for begin in range(0, len(cells), len(batches)):
        row = cells[begin : begin + len(batches)]
        times = "".join(cell.time.describe(cell.rates) for cell in row)
        yield f"  {row[0].target:18}{times}"

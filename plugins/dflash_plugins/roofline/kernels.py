"""This project's kernels as work: what their launches and their compiled code say of them.

Registers, shared memory and threads are those of the machine code, which `compile_kernel` makes
without a GPU, or finds where it keeps it. A kernel without a loop over K and V has one tile of
each program on its way, in registers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from dflash_plugins.block_attention.benchmark import AttentionPoint
from dflash_plugins.block_attention.launch import BLOCK, FEW, FLOOR, LEAST
from dflash_plugins.compile import compile_kernel
from dflash_plugins.gated_delta_step.launch import STEP
from dflash_plugins.operation import Case
from dflash_plugins.roofline.attention import AttentionWork, merge_work, split_work
from dflash_plugins.roofline.model import LaunchWork, PredictedTime, kernel_residency, predict
from dflash_plugins.roofline.rates import GpuRates, device_rates
from dflash_plugins.roofline.recurrence import ROWS, predict_recurrence
from dflash_plugins.roofline.sampling import choice_work, group_work
from dflash_plugins.row_sample.benchmark import SamplePoint
from dflash_trt.hardware.device import Device

Predictor = Callable[[Any], PredictedTime | None]
"""The time of a point of a benchmark; None where the formula has none."""

WRITERS = ("kv_cache_update", "kv_feature_injection")
MEASURED_TACTICS = (BLOCK, FEW, LEAST, FLOOR)
"""Of a block's rows; the other gives a program more rows than a block has."""


def predict_point(point: Any, rates: GpuRates, folder: Path) -> PredictedTime | None:
    """The time of a point of any operation's benchmark; None where the formula has none.

    `folder` keeps what is compiled. Attention takes the fastest tactic at this point; an engine has
    one for all of a profile. Prefill chunks have no time here: arithmetic bounds them.

    Raises:
        DflashError: Triton language is not installed, or a kernel does not compile.
    """
    if isinstance(point, AttentionPoint):
        if point.is_chunk:
            return None
        found = [_attention(point, tactic, rates, folder) for tactic in MEASURED_TACTICS]
        return min(found, key=lambda one: one.seconds)
    if isinstance(point, SamplePoint):
        return _row_sample(point, rates, folder)
    if isinstance(point, Case) and point.operation.kernel == "gated_delta_step":
        _, count, _ = point.inputs["new_rows"].shape
        return None if count > ROWS else predict_recurrence(point, rates, folder, STEP)
    if isinstance(point, Case) and point.operation.kernel == "accept":
        return _small(point, rates, folder, chain=1)
    if isinstance(point, Case) and point.operation.kernel in WRITERS:
        # Positions, the page, the scales: each load waits for the one before it.
        more = {"page_table", "kv_scales"} & set(point.operation.inputs)
        return _small(point, rates, folder, chain=1 + len(more))
    return None


def open_predictor(device: Device, folder: Path) -> Predictor | None:
    """What `predict_point` says of points on `device`; None where that GPU is not rated."""
    rates = device_rates(device.name, device.arch, device.total_bytes)
    return None if rates is None else partial(predict_point, rates=rates, folder=folder)


def attention_work(
    point: AttentionPoint, tactic: int, rates: GpuRates, folder: Path
) -> AttentionWork:
    """The work of `block_attention` at `point` with a tactic.

    Products of two FP8 parts take as long as one in 16 bits, and nothing is converted; that sm_90a
    converts V all the same is left out.
    """
    case, shape = point.cases[0], point.shape
    launch = case.launch(tactic)
    kernel = compile_kernel(case.kernel_spec(tactic), rates.kernels, folder)
    constants: dict[str, Any] = dict(launch.constants)
    rows, positions = constants["BLOCK_M"], constants["TILE"]
    tile_bytes = 2 * positions * shape.head_dim * shape.cache.numpy.itemsize
    row_bytes = rows * shape.head_dim * shape.compute.numpy.itemsize
    group = shape.query_heads // shape.kv_heads
    row_blocks = -(-point.rows * group // rows)
    splits = launch.grid[0] // row_blocks
    held = point.context + point.rows
    first = max(0, point.context - shape.window + 1) if shape.window else 0
    return AttentionWork(
        batch=point.batch,
        context=held - first,
        query_heads=shape.query_heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        rows=point.rows,
        item_bytes=shape.cache.numpy.itemsize,
        is_paged=shape.page_size is not None,
        tile_rows=rows,
        tile_positions=positions,
        buffers=max(1, (kernel.resources.shared_bytes - row_bytes) // tile_bytes),
        resident=kernel_residency(kernel, rates),
        splits=splits,
        split_tiles=tuple(
            split_tiles(split, first, held, splits, constants["RUN"], positions)
            for split in range(splits)
        ),
        row_blocks=row_blocks,
        is_merged=shape.is_split,
        is_converted=shape.cache is not shape.compute and not constants["FP8"],
    )


def split_tiles(split: int, first: int, end: int, splits: int, run: int, tile: int) -> int:
    """Tiles of `split` with any of the positions [first, end): `tile_range` of the kernel.

    Runs of `run` positions go to the splits in turn.
    """
    seen = range(first // tile, -(-end // tile))
    runs = range(split * run // tile, seen.stop, splits * run // tile)
    return sum(1 for begin in runs for one in range(begin, begin + run // tile) if one in seen)


def _attention(point: AttentionPoint, tactic: int, rates: GpuRates, folder: Path) -> PredictedTime:
    work = attention_work(point, tactic, rates, folder)
    works = [split_work(work, rates)]
    if len(point.cases) > 1:
        merge = point.cases[1]
        kernel = compile_kernel(merge.kernel_spec(), rates.kernels, folder)
        resident = kernel_residency(kernel, rates)
        works.append(replace(merge_work(work, rates), resident=resident))
    return predict(works, point.required_bytes, rates)


def _small(case: Case, rates: GpuRates, folder: Path, chain: int) -> PredictedTime:
    """A kernel whose programs read and write a few rows, which are in the L2 cache.

    `chain` is how many loads wait for each other before the rows are asked for.
    """
    kernel = compile_kernel(case.kernel_spec(), rates.kernels, folder)
    grid = case.launch().grid
    programs = grid[0] * grid[1] * grid[2]
    caches = set(case.operation.aliases.values()) | {"page_table", "cos", "sin"}
    read = sum(one.nbytes for name, one in case.inputs.items() if name not in caches)
    aliased = set(case.operation.aliases)
    written = sum(one.nbytes for name, one in case.outputs.items() if name not in aliased)
    if aliased:  # rows of k and v, in the caches' type
        rows, cache = case.inputs["k"], case.inputs["k_cache"]
        written = 2 * replace(rows, dtype=cache.dtype).nbytes
    work = LaunchWork(
        name=case.operation.name,
        groups=((programs, 1),),
        tile_bytes=read / programs,
        buffers=1,
        tile_seconds=0.0,
        resident=kernel_residency(kernel, rates),
        cached_loads=chain,
        is_cached=True,
        written_bytes=written,
    )
    return predict((work,), read + written, rates)


def _row_sample(point: SamplePoint, rates: GpuRates, folder: Path) -> PredictedTime:
    specs = [case.kernel_spec() for case in point.cases]
    compiled = (compile_kernel(one, rates.kernels, folder) for one in specs)
    groups, choice = (kernel_residency(one, rates) for one in compiled)
    works = group_work(point, groups, rates), choice_work(point, choice, rates)
    return predict(works, point.logits.nbytes, rates)

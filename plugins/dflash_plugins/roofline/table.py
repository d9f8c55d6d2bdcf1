"""The calculator's tables: attention by context and batch, a step's small kernels, the errors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dflash_plugins.block_attention.benchmark import AttentionPoint
from dflash_plugins.block_attention.cases import draft_shape
from dflash_plugins.operation import DType
from dflash_plugins.public import public_pairs
from dflash_plugins.roofline.attention import OPENING_LOADS
from dflash_plugins.roofline.kernels import predict_point
from dflash_plugins.roofline.model import PredictedTime
from dflash_plugins.roofline.published import PublishedArithmetic, PublishedTime
from dflash_plugins.roofline.rates import GpuRates, latency_source, read_constants
from dflash_plugins.roofline.steps import StepPart
from dflash_trt.core.limits import PAGE_SIZE

MB = 10**6
LARGE_BYTES, MIDDLE_BYTES = 64 * MB, 16 * MB
"""What attention reads at least, to be judged by its share of the bandwidth."""
LARGE_GOAL, MIDDLE_GOAL, SMALL_GOAL = 0.8, 0.6, 2.0
"""The least shares, and below MIDDLE_BYTES the most times its floor."""
FORMULA = """\
time  = launch + dependent loads + Σ of waves + written bytes ÷ bandwidth, and a merge's time
wave  = max(programs' own time, bytes ÷ (reach × bandwidth) + arithmetic of the last tile)
tile  = max(arithmetic, (latency ÷ √(1 - load²) + arithmetic) ÷ buffers): Little's law
share = required bytes ÷ time ÷ the data sheet's bandwidth
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCell:
    """`block_attention` of one block of a public draft's heads, at a batch and a context."""

    rates: GpuRates
    pair: str
    point: AttentionPoint
    time: PredictedTime

    @property
    def share(self) -> float:
        return self.time.share(self.rates)

    @property
    def floor_seconds(self) -> float:
        """One launch, one load from memory and the required bytes at the full bandwidth."""
        rates = self.rates
        return self.point.required_bytes / rates.bandwidth + rates.launch + rates.memory_latency

    @property
    def over_floor(self) -> float:
        return self.time.seconds / self.floor_seconds

    @property
    def streaming_seconds(self) -> float:
        """Of one launch that does nothing but stream: no arithmetic, no splits, no merge."""
        rates = self.rates
        loads = OPENING_LOADS * rates.l2_latency + rates.memory_latency
        return rates.launch + loads + self.point.required_bytes / rates.reach

    def meets_goal(self, seconds: float) -> bool:
        """Whether it would in so many seconds."""
        size, bandwidth = self.point.required_bytes, self.rates.bandwidth
        if size < MIDDLE_BYTES:
            return seconds <= SMALL_GOAL * self.floor_seconds
        return size / seconds / bandwidth >= (LARGE_GOAL if size >= LARGE_BYTES else MIDDLE_GOAL)

    def as_json(self) -> dict[str, Any]:
        return {
            "kernel": "block_attention",
            "gpu": self.rates.name,
            "pair": self.pair,
            "batch": self.point.batch,
            "context": self.point.context,
            "required_bytes": self.point.required_bytes,
            "predicted_seconds": self.time.seconds,
            "predicted_share": self.share,
            "limit": self.time.limit,
        }


def attention_cells(
    rates: GpuRates,
    pair: str,
    batches: Sequence[int],
    contexts: Sequence[int],
    folder: Path,
    *,
    cache: DType = DType.BFLOAT16,
    is_paged: bool = False,
) -> Iterator[AttentionCell]:
    """Every context with every batch, for blocks as large as the pair's draft is trained for."""
    for context in contexts:
        for batch in batches:
            shape = draft_shape(public_pairs()[pair], 0)
            rows = shape.block_size
            length = -(-(context + rows) // PAGE_SIZE) * PAGE_SIZE
            page_size = PAGE_SIZE if is_paged else None
            shape = replace(shape, length=length, cache=cache, page_size=page_size)
            point = AttentionPoint(pair, shape, batch, context, rows)
            time = predict_point(point, rates, folder)
            assert time is not None
            yield AttentionCell(rates=rates, pair=pair, point=point, time=time)


def describe_attention(cells: Sequence[AttentionCell]) -> Iterator[str]:
    """A matrix of one GPU and pair: µs, share of the bandwidth, and what takes the most."""
    batches = list(dict.fromkeys(cell.point.batch for cell in cells))
    first = cells[0]
    kind = first.point.shape.cache.kernel_name
    paged = " paged" if first.point.shape.page_size else ""
    yield f"block_attention, {first.rates.title}, {first.pair} {kind}{paged}: predictions"
    yield f"  {'context':>8}" + "".join(f"{f'batch {batch}':>30}" for batch in batches)
    for begin in range(0, len(cells), len(batches)):
        row = cells[begin : begin + len(batches)]
        times = "".join(cell.time.describe(cell.rates) for cell in row)
        yield f"  {row[0].point.context:8,}{times}"


def describe_classes(cells: Iterable[AttentionCell]) -> Iterator[str]:
    """The least share where attention reads much, and the most time over the floor elsewhere."""
    by_gpu: dict[str, list[AttentionCell]] = {}
    for cell in cells:
        by_gpu.setdefault(cell.rates.title, []).append(cell)
    for title, found in by_gpu.items():
        large = [c for c in found if c.point.required_bytes >= LARGE_BYTES]
        middle = [c for c in found if MIDDLE_BYTES <= c.point.required_bytes < LARGE_BYTES]
        small = [c for c in found if c.point.required_bytes < MIDDLE_BYTES]
        parts = [
            f"{name} {min(c.share for c in some):.0%} to {max(c.share for c in some):.0%}, "
            f"{_count_goals(some, goal)}"
            for name, some, goal in (
                ("from 64 MB", large, f"{LARGE_GOAL:.0%}"),
                ("16 to 64 MB", middle, f"{MIDDLE_GOAL:.0%}"),
            )
            if some
        ]
        if small:
            times = [c.over_floor for c in small]
            parts.append(
                f"below {min(times):.1f} to {max(times):.1f} × (launch + load + bytes), "
                f"{_count_goals(small, f'{SMALL_GOAL:g} ×')}"
            )
        yield f"block_attention, {title}: {'; '.join(parts)}"


def _count_goals(cells: Sequence[AttentionCell], goal: str) -> str:
    met = sum(1 for one in cells if one.meets_goal(one.time.seconds))
    possible = sum(1 for one in cells if one.meets_goal(one.streaming_seconds))
    return f"{goal} in {met} of {len(cells)} (streaming alone: {possible})"


def describe_steps(rates: GpuRates, parts: Sequence[StepPart]) -> Iterator[str]:
    """The small kernels of a pair's step, and their share of the least that it can take."""
    yield f"a step, {rates.title}, {parts[0].pair}: predictions"
    for part in parts:
        name = f"{part.kernel}{f', {part.what}' if part.what else ''}"
        yield (
            f"  batch {part.batch:3} × {part.context:7,}  {name:36} {part.count:3} × "
            f"{part.seconds / part.count * 1e6:8,.1f} µs  {part.share:6.1%} of "
            f"{part.step_seconds * 1e3:.2f} ms"
        )


def describe_errors(times: Sequence[PublishedTime]) -> Iterator[str]:
    """Predicted beside published, for every measurement."""
    yield (
        f"{'kernel':24}{'GPU':>6}{'batch':>7}{'context':>9}{'MB':>7}"
        f"{'published':>18}{'predicted':>18}{'points':>8}"
    )
    for one in times:
        published = f"{one.seconds * 1e6:,.1f} µs {one.share:4.0%}"
        predicted = f"{one.predicted.seconds * 1e6:,.1f} µs {one.predicted_share:4.0%}"
        work = one.work
        yield (
            f"{one.name:24}{one.rates.name:>6}{work.batch:>7}{work.context:>9,}"
            f"{work.cache_bytes / MB:>7,.0f}{published:>18}{predicted:>18}{one.error:>+8.1f}"
        )
    within = sum(1 for one in times if abs(one.error) <= 15)
    mean = sum(abs(one.error) for one in times) / len(times)
    yield f"{within} of {len(times)} within 15 points; {mean:.1f} points off on average"
    for source in dict.fromkeys(one.source for one in times):
        yield f"  {source}"


def describe_arithmetic(found: Sequence[PublishedArithmetic]) -> Iterator[str]:
    """Predicted beside published, for whole prompts."""
    yield (
        f"{'prompts, TFLOP/s':24}{'GPU':>6}{'published':>11}{'predicted':>11}{'by hand':>9}  tile"
    )
    for one in found:
        yield (
            f"{one.name:24}{one.rates.name:>6}{one.flops / 1e12:>11,.0f}"
            f"{one.predicted / 1e12:>11,.0f}{one.by_hand / 1e12:>9,.0f}"
            f"  {one.rows} × {one.positions}, assumed"
        )
        yield f"  {one.source}; by hand: {one.by_hand_source}"


def describe_formula() -> Iterator[str]:
    """The formula, its constants and their sources."""
    yield from FORMULA.splitlines()
    for one in read_constants().values():
        yield f"  {one.name} = {one.value:g} ({one.unit}), {one.kind}: {one.source}"
    yield f"  latencies, measured: {latency_source()}"
    yield "  SMs, clocks, bandwidths, products: dflash_trt/hardware/gpus.yaml"

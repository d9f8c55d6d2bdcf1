"""The formula: the time of a launch from what its programs need and what a GPU has.

    time = launch + dependent loads + waves of streaming + what is written

A program reads its tiles through `buffers` of them. A buffer is filled in the latency of a load and
then waits for the arithmetic of its tile, so a program reads a tile every
max(arithmetic, (latency + arithmetic) / buffers): Little's law. Latency grows with the load u of
the memory, to idle / (1 - u^n)^(1/n), and u is what all resident programs ask for at that latency:
one number, found by bisection. Programs that do not fit at once come in further waves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dflash_plugins.compile import CompiledKernel
from dflash_plugins.roofline.rates import GpuRates

WARP = 32
REGISTER_STEP, WARP_REGISTER_STEP = 8, 256
"""Registers of a thread, and of a warp, are handed out in such steps (CUDA's occupancy rules)."""
BLOCK_SHARED_BYTES = 1024
"""Shared memory that the system keeps of every block, from sm_80 on."""
HALVINGS, LEAST_SLACK = 50, 1e-12
ProgramGroup = tuple[int, int]
"""How many programs, and how many tiles each of them reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchWork:
    """One launch, as far as its time goes.

    Args:
        name: the kernel's.
        groups: programs that have work, those with the most tiles first.
        tile_bytes: what a tile reads; from memory, or from the L2 cache if `is_cached`.
        buffers: tiles of a program that are on their way at once.
        tile_seconds: arithmetic of a tile, from its data to the next tile's turn.
        resident: programs that an SM holds at once.
        cached_loads: loads from the L2 cache before the first tile, each waiting for the last.
        written_bytes: written at the end; to the L2 cache if `is_written_cached`.
    """

    name: str
    groups: tuple[ProgramGroup, ...]
    tile_bytes: float
    buffers: int
    tile_seconds: float
    resident: int
    cached_loads: int
    is_cached: bool = False
    written_bytes: float = 0.0
    is_written_cached: bool = True

    @property
    def programs(self) -> int:
        """Programs that have work."""
        return sum(count for count, _ in self.groups)

    @property
    def read_bytes(self) -> float:
        return self.tile_bytes * sum(count * tiles for count, tiles in self.groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchTime:
    """Seconds of one launch by what they are spent on.

    Of `stream`, `transfer` is what the bytes take at the bandwidth that streaming reaches, and
    `arithmetic` what the busiest SM's tiles take. `load` is the memory's highest, 0 to 1.
    """

    work: LaunchWork
    launch: float
    latency: float
    stream: float
    transfer: float
    arithmetic: float
    write: float
    waves: int
    load: float

    @property
    def seconds(self) -> float:
        return self.launch + self.latency + self.stream + self.write


@dataclass(frozen=True, slots=True)
class PredictedTime:
    """The launches of one operation, one after the other, and the bytes that it cannot avoid."""

    launches: tuple[LaunchTime, ...]
    required_bytes: float

    @property
    def seconds(self) -> float:
        return sum(one.seconds for one in self.launches)

    def share(self, rates: GpuRates) -> float:
        """Of the data sheet's bandwidth, as benchmarks count it: required bytes by all seconds."""
        return self.required_bytes / self.seconds / rates.bandwidth

    @property
    def limit(self) -> str:
        """What takes the most of it; a stream that neither bytes nor arithmetic fill, waits."""
        first, *later = self.launches
        full = max(first.transfer, first.arithmetic)
        spent = {
            "launches": sum(one.launch for one in self.launches),
            "bandwidth" if first.transfer == full else "arithmetic": full,
            "latency": first.latency + first.stream - full,
            "writing": first.write,
            "merge": sum(one.seconds - one.launch for one in later),
        }
        return max(spent, key=lambda name: spent[name])

    def describe(self, rates: GpuRates) -> str:
        """A column of a table: µs, share of the bandwidth, and what takes the most."""
        text = f"{self.seconds * 1e6:,.1f} µs {self.share(rates):4.0%} {self.limit}"
        return f"{text:>30}"


def resident_programs(rates: GpuRates, *, threads: int, registers: int, shared_bytes: int) -> int:
    """Programs of so many threads, registers a thread and bytes of shared memory on one SM."""
    warps = threads // WARP
    thread_registers = -(-registers // REGISTER_STEP) * REGISTER_STEP
    warp_registers = -(-thread_registers * WARP // WARP_REGISTER_STEP) * WARP_REGISTER_STEP
    return min(
        rates.threads // threads,
        rates.registers // (warp_registers * warps),
        rates.shared_bytes // (shared_bytes + BLOCK_SHARED_BYTES),
    )


def kernel_residency(kernel: CompiledKernel, rates: GpuRates) -> int:
    """Programs of a compiled kernel on one SM."""
    took = kernel.resources
    return resident_programs(
        rates, threads=kernel.threads, registers=took.registers, shared_bytes=took.shared_bytes
    )


def attention_tile_seconds(
    rates: GpuRates,
    *,
    rows: int,
    positions: int,
    head_dim: int,
    is_converted: bool,
) -> float:
    """Arithmetic of a tile of K and V: both products, the softmax between them, what waits on what.

    One after the other, as each needs the last: q k^T, exponentials and sums, p v. `is_converted`:
    elements of K and V are converted to the type of the products first.
    """
    scores = rows * positions
    products = 4 * scores * head_dim / rates.products
    softmax = scores / rates.exponentials + rates.softmax_instructions * scores / rates.lanes
    converted = 2 * positions * head_dim / rates.conversions if is_converted else 0.0
    return products + softmax + converted + rates.tile_latency


def predict_launch(work: LaunchWork, rates: GpuRates) -> LaunchTime:
    """The time of one launch."""
    found = [_wave(work, rates, wave) for wave in _waves(work, rates.sms * work.resident)]
    loads = work.cached_loads * rates.l2_latency + _idle(work, rates)
    written_bandwidth = rates.l2_bandwidth if work.is_written_cached else rates.reach
    return LaunchTime(
        work=work,
        launch=rates.launch,
        # Of a later wave's loads, the other programs of its SM hide their part.
        latency=loads * (1 + (len(found) - 1) / work.resident),
        stream=sum(one.seconds for one in found),
        transfer=work.read_bytes / _bandwidth(work, rates),
        arithmetic=sum(one.arithmetic for one in found),
        write=work.written_bytes / written_bandwidth,
        waves=len(found),
        load=max(one.load for one in found),
    )


def _waves(work: LaunchWork, slots: int) -> Iterator[list[ProgramGroup]]:
    """Programs that run at once, wave after wave."""
    wave, room = list[ProgramGroup](), slots
    for count, tiles in work.groups:
        left = count
        while left:
            taken = min(left, room)
            wave.append((taken, tiles))
            left, room = left - taken, room - taken
            if not room:
                yield wave
                wave, room = [], slots
    if wave:
        yield wave


def _idle(work: LaunchWork, rates: GpuRates) -> float:
    return rates.l2_latency if work.is_cached else rates.memory_latency


def _bandwidth(work: LaunchWork, rates: GpuRates) -> float:
    return rates.l2_bandwidth if work.is_cached else rates.reach


@dataclass(frozen=True, slots=True)
class _Wave:
    """Programs that run at once: their seconds, the memory's load, the busiest SM's arithmetic."""

    seconds: float
    load: float
    arithmetic: float


def _wave(work: LaunchWork, rates: GpuRates, wave: list[ProgramGroup]) -> _Wave:
    """One wave; all its programs count as long as the longest, which is the first."""
    programs, tiles = sum(count for count, _ in wave), wave[0][1]
    bandwidth = _bandwidth(work, rates)
    sms = min(rates.sms, programs)
    most = -(-programs // sms)
    full = programs - (most - 1) * sms  # SMs that hold `most` programs; the others one fewer

    def period(held: int, load: float) -> float:
        """Seconds from a program's tile to its next where its SM holds `held` programs."""
        exponent = rates.load_exponent
        slack: float = max(1 - load**exponent, LEAST_SLACK) ** (1 / exponent)
        latency = _idle(work, rates) / slack
        arithmetic = held * work.tile_seconds
        return max(arithmetic, (latency + arithmetic) / work.buffers)

    def asked(load: float) -> float:
        """Bytes per second that all programs ask for."""
        rate = full * most / period(most, load)
        if most > 1:
            rate += (sms - full) * (most - 1) / period(most - 1, load)
        return rate * work.tile_bytes

    low, high = 0.0, 1.0
    for _ in range(HALVINGS):
        load = (low + high) / 2
        low, high = (load, high) if asked(load) > load * bandwidth else (low, load)
    first = min(work.buffers, tiles)  # on their way together from the start
    own = first * most * work.tile_seconds + (tiles - first) * period(most, low)
    moved = work.tile_bytes * sum(count * read for count, read in wave)
    last = most * work.tile_seconds  # nothing arrives any more while it is computed
    return _Wave(max(own, moved / bandwidth + last), low, tiles * last)


def predict(works: Sequence[LaunchWork], required_bytes: float, rates: GpuRates) -> PredictedTime:
    """The time of launches that wait for each other."""
    return PredictedTime(tuple(predict_launch(one, rates) for one in works), required_bytes)

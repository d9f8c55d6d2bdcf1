"""What a GPU does in a second, and how long it makes a load wait: data sheets and measurements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from dflash_trt.core.yaml_files import read_yaml
from dflash_trt.errors import DflashError, nearest, one_line
from dflash_trt.hardware.gpus import Arch, Gpu, arches, find_gpu, gpu_names, match_gpu
from dflash_trt.hardware.kernels import kernel_arch

CONSTANTS_FILE = Path(__file__).with_name("constants.yaml")
FASTER_EXPONENTIALS = {"sm_103": 2}
"""Architectures whose exponentials are so many times as fast as the others'."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineConstant:
    """A figure of constants.yaml: what it counts, how it was had (`kind`), and from where."""

    name: str
    value: float
    unit: str
    kind: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuRates:
    """A GPU as the formula sees it; times in seconds, rates in 1/s.

    `bandwidth` is the data sheet's, which shares are of; `reach` is what streaming gets of it.
    `products` are dense bfloat16 FLOP/s of one SM, the next three of one SM too;
    `softmax_instructions` those of a score besides its exponential. Of an SM's
    resident programs `shared_bytes`, `registers` and `threads` are the most.
    """

    name: str
    title: str
    kernels: str
    sms: int
    bandwidth: float
    reach: float
    l2_bandwidth: float
    l2_bytes: int
    memory_latency: float
    l2_latency: float
    launch: float
    load_exponent: float
    products: float
    exponentials: float
    lanes: float
    conversions: float
    softmax_instructions: float
    tile_latency: float
    shared_bytes: int
    registers: int
    threads: int


def rated_gpus() -> list[str]:
    """Names of the GPUs that have kernels and whose SMs, clock and L2 cache are known."""
    known = arches()
    return [
        name
        for name in gpu_names()
        if (gpu := find_gpu(name)).sms is not None and known[gpu.arch].kernels is not None
    ]


def find_rates(name: str, **other: Any) -> GpuRates:
    """The rates of the GPU called `name`; `other` figures of one like it replace its own.

    Those are sms, bandwidth (bytes/s) and clock (Hz).

    Raises:
        DflashError: no such GPU is rated; names the nearest (usage).
    """
    names = rated_gpus()
    if name.lower() not in names:
        raise DflashError(
            f"no figures are known of a GPU called {one_line(name, 40)!r}"
            f"{nearest(name.lower(), names)}",
            where="--gpu",
            fix=f"choose one of {', '.join(names)}",
            usage=True,
        )
    gpu = find_gpu(name)
    return _rates(gpu, arches()[gpu.arch], **other)


def _rates(
    gpu: Gpu,
    arch: Arch,
    sms: int | None = None,
    bandwidth: float | None = None,
    clock: float | None = None,
) -> GpuRates:
    assert gpu.sms is not None and gpu.boost_hz is not None and gpu.l2_bytes is not None
    constants, clock = read_constants(), clock or gpu.boost_hz
    latency = read_latencies()[arch.name]
    bandwidth = bandwidth or gpu.bandwidth
    exponentials = constants["exponentials_per_clock"].value * FASTER_EXPONENTIALS.get(arch.name, 1)
    return GpuRates(
        name=gpu.name,
        title=gpu.title,
        kernels=kernel_arch(arch.name),
        sms=sms or gpu.sms,
        bandwidth=bandwidth,
        reach=constants["dram_reach"].value * bandwidth,
        l2_bandwidth=constants["l2_bandwidth_ratio"].value * bandwidth,
        l2_bytes=gpu.l2_bytes,
        memory_latency=latency["memory"] * 1e-9,
        l2_latency=latency["l2"] * 1e-9,
        launch=constants["launch_us"].value * 1e-6,
        load_exponent=constants["load_exponent"].value,
        products=gpu.bf16 / gpu.sms * clock / gpu.boost_hz,
        exponentials=exponentials * clock,
        lanes=constants["lanes_per_clock"].value * clock,
        conversions=constants["conversions_per_clock"].value * clock,
        softmax_instructions=constants["softmax_instructions"].value,
        tile_latency=constants["tile_clocks"].value / clock,
        shared_bytes=arch.sm_shared_bytes,
        registers=arch.registers,
        threads=arch.sm_threads,
    )


@cache
def _raw() -> Mapping[str, Any]:
    return read_yaml(CONSTANTS_FILE)


def read_constants() -> dict[str, RooflineConstant]:
    """The formula's constants by name, the latencies apart."""
    return {
        name: RooflineConstant(name=name, **one)
        for name, one in _raw().items()
        if name != "latency"
    }


def read_latencies() -> dict[str, Mapping[str, float]]:
    """ns of a dependent load from L2 (`l2`) and from memory (`memory`), by architecture."""
    return {name: one for name, one in _raw()["latency"].items() if isinstance(one, dict)}


def latency_source() -> str:
    """Where the latencies are from."""
    return str(_raw()["latency"]["source"])


def device_rates(name: str, arch: str, memory_bytes: int) -> GpuRates | None:
    """The rates of the GPU that a driver calls `name`; None where it is not rated."""
    gpu = match_gpu(name, arch, memory_bytes)
    return find_rates(gpu.name) if gpu is not None and gpu.name in rated_gpus() else None

"""What this project takes CUDA to do, shown on the device itself; no library and no kernel."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dflash_trt.core.machine import describe_host
from dflash_trt.errors import DflashError
from dflash_trt.hardware.device import ALIGNMENT, Device, HostBytes, load_cuda
from dflash_trt.hardware.gpus import arches
from dflash_trt.proof.gpu_check.probe import Probe, attempt
from dflash_trt.proof.gpu_check.setting import Setting

ALIGNED = "device memory is aligned for TensorRT"
IN_ORDER = "copies run in the order of the stream"
EVENTS = "waiting for an event waits for what is before it"
PITCHES = "rows are copied and cleared within their pitch"
GRAPHS = "a graph runs when it is launched, over what is there then"
CAPTURES = "a capture that fails leaves the stream usable"
FREED = "memory that is freed is free again"

SIZE = 1 << 20
LARGE = 64 << 20
COPIED_BYTES, COPIES = 1 << 30, 10
NEEDS_GPU = "--gpu-check is for an NVIDIA GPU; `dflash-trt doctor` says what runs without one"
DRIVER_VERSION = Path("/sys/module/nvidia/version")

RECORDED = (
    "dflash-trt numpy onnx onnxruntime cuda-python cuda-bindings triton torch flashinfer-python "
    "tensorrt tensorrt-cu13 tensorrt-cu12 tensorrt-rtx tensorrt-rtx-cu13 tensorrt-rtx-cu12"
).split()


def describe_machine(setting: Setting) -> Iterator[Probe]:
    """One finding: the GPU, its driver and the versions of what is installed.

    Raises:
        DflashError: there is no GPU, or cuda-python is missing.
    """
    load_cuda()
    try:
        device = Device()
    except DflashError as error:
        raise DflashError(error.what, fix=NEEDS_GPU) from error
    gpu = device.describe()
    device.close()
    driver = DRIVER_VERSION.read_text().strip() if DRIVER_VERSION.is_file() else None
    known = arches().get(gpu["arch"])
    kernels = "none" if known is None or known.kernels is None else known.kernels
    yield Probe(
        name="the GPU answers",
        passed=True,
        detail=f"{gpu['name']} ({gpu['arch']}), {gpu['memory_gb']} GB, driver {driver or 'unknown'}"
        f" for CUDA {gpu['driver_cuda']}; this project's kernels for it: {kernels}",
        figures={"gpu": gpu | {"driver": driver}, **describe_host(RECORDED)},
    )


def check_cuda(setting: Setting) -> Iterator[Probe]:
    """Every contract of `Device` that the stand-in for CUDA believes, and the copy bandwidth."""
    with closing(Device()) as device:
        probes: dict[str, Callable[[Device], tuple[bool, str]]] = {
            ALIGNED: _is_aligned,
            IN_ORDER: _copies_in_order,
            EVENTS: _waits_for_events,
            PITCHES: _keeps_pitches,
            GRAPHS: _replays,
            CAPTURES: _survives_a_failed_capture,
            FREED: _frees,
        }
        for name, probe in probes.items():
            yield from attempt(name, partial(_judge, device, name, probe))
        yield from attempt("copy bandwidth", lambda: _measure_copy(device))


def _judge(device: Device, name: str, probe: Callable[[Device], tuple[bool, str]]) -> Probe:
    holds, detail = probe(device)
    return Probe(name=name, passed=holds, detail=detail)


def _is_aligned(device: Device) -> tuple[bool, str]:
    addresses = [device.allocate(size, "a probe") for size in (1, 3, ALIGNMENT + 1, SIZE)]
    for address in addresses:
        device.free(address)
    off = [address % ALIGNMENT for address in addresses]
    return not any(off), f"four allocations lie {off} bytes past multiples of {ALIGNMENT}"


def _copies_in_order(device: Device) -> tuple[bool, str]:
    with _Buffers(device, SIZE, SIZE) as (first, second):
        sent, back = first.fill(1), second.host
        device.upload(first.address, first.host)
        device.copy(second.address, first.address, SIZE)
        device.download(back, second.address)
        device.synchronize()
        return _equal(back, sent)


def _waits_for_events(device: Device) -> tuple[bool, str]:
    with _Buffers(device, SIZE, LARGE) as (small, large):
        sent, event = small.fill(2), device.make_event()
        device.upload(small.address, small.host)
        small_back = large.host[:SIZE]
        device.download(small_back, small.address)
        device.record(event)
        device.clear(large.address, LARGE)
        device.clear(small.address, SIZE)
        device.wait(event)
        found = _equal(small_back, sent)
        device.synchronize()
        return found


def _keeps_pitches(device: Device) -> tuple[bool, str]:
    pitch, width, rows = 1024, 700, SIZE // 1024
    with _Buffers(device, SIZE, SIZE) as (source, destination):
        sent, kept = source.fill(3).reshape(rows, pitch), destination.fill(4).reshape(rows, pitch)
        for one in (source, destination):
            device.upload(one.address, one.host)
        device.synchronize()
        places = destination.address, source.address
        device.copy_rows(*places, pitch=pitch, width=width, rows=rows)
        device.clear_rows(destination.address, pitch=pitch, width=width // 2, rows=rows)
        device.download(destination.host, destination.address)
        device.synchronize()
        kept[:, :width] = sent[:, :width]
        kept[:, : width // 2] = 0
        return _equal(destination.host, kept.ravel())


def _replays(device: Device) -> tuple[bool, str]:
    with _Buffers(device, SIZE, SIZE) as (source, destination):
        before = destination.fill(5)
        device.upload(destination.address, destination.host)
        device.synchronize()
        device.begin_capture()
        device.copy(destination.address, source.address, SIZE)
        graph = device.end_capture()
        device.download(destination.host, destination.address)
        device.synchronize()
        waited, _ = _equal(destination.host, before)
        sent = source.fill(6)
        device.upload(source.address, source.host)
        device.launch(graph)
        device.download(destination.host, destination.address)
        device.synchronize()
        ran, detail = _equal(destination.host, sent)
        device.destroy_graph(graph)
        return (
            waited and ran,
            f"{detail}; {'nothing' if waited else 'it'} ran while it was captured",
        )


def _survives_a_failed_capture(device: Device) -> tuple[bool, str]:
    device.begin_capture()
    reason = "synchronising while capturing was no error"
    try:
        device.synchronize()
    except DflashError as error:
        reason = error.message
    device.abandon_capture()
    holds, detail = _copies_in_order(device)
    return holds, f"{detail} after: {reason}"


def _frees(device: Device) -> tuple[bool, str]:
    before = device.free_bytes()
    address = device.allocate(LARGE, "a probe")
    held = before - device.free_bytes()
    device.free(address)
    lost = before - device.free_bytes()
    detail = f"{LARGE:,} bytes take {held:,}, of which {lost:,} are missing once they are freed"
    return held >= LARGE and lost < LARGE // 2, detail


def _measure_copy(device: Device) -> Probe:
    """Bytes read plus bytes written, per second, of large copies."""
    size = min(COPIED_BYTES, device.free_bytes() // 4)
    source, destination = (device.allocate(size, "a probe") for _ in range(2))
    device.copy(destination, source, size)
    device.synchronize()
    started = time.perf_counter()
    for _ in range(COPIES):
        device.copy(destination, source, size)
    device.synchronize()
    rate = 2 * size * COPIES / (time.perf_counter() - started)
    return Probe(
        name="copy bandwidth",
        passed=None,
        detail=f"{rate / 1e9:,.0f} GB/s",
        figures={"bytes_per_second": rate, "copied_bytes": size},
    )


class _Buffer:
    """Device memory and its pinned twin."""

    def __init__(self, device: Device, size: int) -> None:
        self.address = device.allocate(size, "a probe")
        self.host = device.allocate_host(size)

    def fill(self, seed: int) -> HostBytes:
        """Puts random bytes into the twin; returns a copy of them."""
        self.host[...] = np.random.default_rng(seed).integers(0, 256, self.host.size, np.uint8)
        return self.host.copy()


class _Buffers:
    """A few buffers, freed in the end."""

    def __init__(self, device: Device, *sizes: int) -> None:
        self._device, self._sizes = device, sizes
        self._held: list[_Buffer] = []

    def __enter__(self) -> list[_Buffer]:
        self._held = [_Buffer(self._device, size) for size in self._sizes]
        return self._held

    def __exit__(self, *_: Any) -> None:
        self._device.synchronize()
        for one in self._held:
            self._device.free(one.address)
            self._device.free_host(one.host)


def _equal(actual: HostBytes, expected: HostBytes) -> tuple[bool, str]:
    differ = int((actual != expected).sum())
    return not differ, f"{differ:,} of {expected.size:,} bytes differ"

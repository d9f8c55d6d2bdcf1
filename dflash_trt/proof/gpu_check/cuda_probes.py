"""What this project takes CUDA to do, shown on the device itself; no library and no kernel.

The tests' stand-in for CUDA believes the same: what turns out wrong says that it is to be mended.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np

from dflash_trt.core.machine import describe_host
from dflash_trt.errors import DflashError
from dflash_trt.hardware.device import Device, HostBytes, load_cuda
from dflash_trt.hardware.gpus import arches
from dflash_trt.proof.gpu_check.gpu_record import Probe
from dflash_trt.proof.gpu_check.runner import Found, Setting, attempt

SIZE = 1 << 20
LARGE = 64 << 20
COPIED_BYTES, COPIES = 1 << 30, 10
NEEDS_GPU = "--gpu-check is for an NVIDIA GPU; `dflash-trt doctor` says what runs without one"
DRIVER_VERSION = Path("/sys/module/nvidia/version")


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
    detail = f"{gpu['name']} ({gpu['arch']}); this project's kernels for it: {kernels}"
    figures = {"gpu": gpu | {"driver": driver}, **describe_host()}
    yield Probe("the GPU answers", True, detail, figures)


class _Buffer:
    """Random bytes in device memory, which go when the device is closed; `sent` has them too."""

    def __init__(self, device: Device, seed: int, size: int = SIZE) -> None:
        self._device = device
        self.address, self.host = device.allocate(size, "a probe"), device.allocate_host(size)
        self.sent = self.fill(seed)

    def fill(self, seed: int) -> HostBytes:
        """Sends random bytes; returns a copy of them."""
        self.host[...] = np.random.default_rng(seed).integers(0, 256, self.host.size, np.uint8)
        self._device.upload(self.address, self.host)
        self._device.synchronize()
        return self.host.copy()

    def compare(self, expected: HostBytes) -> tuple[bool, str]:
        """Whether the device has `expected`, once all is done, and in how many bytes not."""
        self._device.download(self.host, self.address)
        self._device.synchronize()
        return _equal(self.host, expected)


def _equal(actual: HostBytes, expected: HostBytes) -> tuple[bool, str]:
    differ = int((actual != expected).sum())
    return not differ, f"{differ:,} of {expected.size:,} bytes differ"


def _copy_in_order(device: Device) -> tuple[bool, str]:
    first, second = _Buffer(device, 0), _Buffer(device, 1)
    device.upload(first.address, first.host)
    device.copy(second.address, first.address, SIZE)
    return second.compare(first.sent)


def _wait_for_events(device: Device) -> Found:
    small, large = _Buffer(device, 0), _Buffer(device, 1, LARGE)
    event, back = device.make_event(), large.host[:SIZE]
    device.download(back, small.address)
    device.record(event)
    device.clear(large.address, LARGE)
    device.clear(small.address, SIZE)
    device.wait(event)
    return _equal(back, small.sent)


def _survive_a_failed_capture(device: Device) -> Found:
    device.begin_capture()
    reason = "synchronising while capturing was no error"
    try:
        device.synchronize()
    except DflashError as error:
        reason = error.message
    device.abandon_capture()
    holds, detail = _copy_in_order(device)
    return holds, f"{detail} after: {reason}"


def _free(device: Device) -> Found:
    before = device.free_bytes()
    address = device.allocate(LARGE, "a probe")
    held = before - device.free_bytes()
    device.free(address)
    lost = before - device.free_bytes()
    detail = f"{LARGE:,} bytes take {held:,}, of which {lost:,} are missing once they are freed"
    return held >= LARGE and lost < LARGE // 2, detail


def _measure_copy(device: Device) -> Found:
    """Bytes read plus bytes written, per second, of large copies."""
    size = min(COPIED_BYTES, device.free_bytes() // 4)
    source, destination = (device.allocate(size, "a probe") for _ in range(2))
    started = 0.0
    for number in range(COPIES + 1):
        device.copy(destination, source, size)
        if not number:
            device.synchronize()
            started = time.perf_counter()
    device.synchronize()
    rate = 2 * size * COPIES / (time.perf_counter() - started)
    return None, f"{rate / 1e9:,.0f} GB/s", {"bytes_per_second": rate, "copied_bytes": size}


PROBES: dict[str, Callable[[Device], Found]] = {
    "waiting for an event waits for what is before it": _wait_for_events,
    "a capture that fails leaves the stream usable": _survive_a_failed_capture,
    "memory that is freed is free again": _free,
    "copy bandwidth": _measure_copy,
}


def check_cuda(setting: Setting) -> Iterator[Probe]:
    """Every belief about `Device`, and the copy bandwidth."""
    for name, find in PROBES.items():
        with closing(Device()) as device:
            yield from attempt(name, find, device)

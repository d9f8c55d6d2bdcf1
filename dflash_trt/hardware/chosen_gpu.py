"""A GPU as its user has it: named, or the one of this machine."""

from __future__ import annotations

from dataclasses import dataclass

from dflash_trt.errors import DflashError
from dflash_trt.hardware.device import Device, has_driver
from dflash_trt.hardware.gpus import Gpu, find_gpu, gpu_names, match_gpu

HERE = "here"
"""What `--gpu` takes for the GPU of this machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One GPU.

    Args:
        title: what it is called.
        arch: as "sm_90", which may be one that nothing is known of.
        memory_bytes: its own.
        gpu: its figures; None where gpus.yaml lacks it.
        found: how many are on this machine; None where it was named.
    """

    title: str
    arch: str
    memory_bytes: int
    gpu: Gpu | None
    found: int | None = None


def choose_card(name: str | None) -> Card:
    """The GPU called `name`; HERE or None: the first of this machine.

    Raises:
        DflashError: no GPU is called so, or there is none here (usage).
    """
    if name is not None and name.lower() != HERE:
        gpu = find_gpu(name)
        return Card(title=gpu.title, arch=gpu.arch, memory_bytes=gpu.memory_bytes, gpu=gpu)
    try:
        return find_card()
    except DflashError as error:
        what = f"no GPU is found on this machine ({error.message})"
        fix = f"name one of {', '.join(gpu_names())}"
        raise DflashError(what, where="--gpu", fix=fix, usage=True) from error


def find_card() -> Card:
    """The first GPU of this machine; DflashError where there is none to be had."""
    if not has_driver():
        raise DflashError("it has no NVIDIA driver")
    device = Device()
    device.close()
    gpu = match_gpu(device.name, device.arch, device.total_bytes)
    return Card(
        title=device.name,
        arch=device.arch,
        memory_bytes=device.total_bytes if gpu is None else gpu.memory_bytes,
        gpu=gpu,
        found=device.count,
    )

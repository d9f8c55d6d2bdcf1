"""The GPUs and architectures that are known, from gpus.yaml."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from dflash_trt.core.yaml_files import read_yaml
from dflash_trt.errors import DflashError, nearest, one_line
from dflash_trt.hardware.arch import Arch
from dflash_trt.hardware.gpu import Gpu

GPUS_FILE = Path(__file__).with_name("gpus.yaml")


@dataclass(frozen=True, slots=True)
class _Table:
    arches: dict[str, Arch]
    gpus: dict[str, Gpu]


def arches() -> dict[str, Arch]:
    """The architectures by name, in the file's order."""
    return _read(GPUS_FILE).arches


def gpu_names() -> list[str]:
    """Names that `find_gpu` knows, in the file's order."""
    return list(_read(GPUS_FILE).gpus)


def find_gpu(name: str) -> Gpu:
    """The GPU called `name`.

    Raises:
        DflashError: none is; names the nearest.
    """
    known = _read(GPUS_FILE).gpus
    if name.lower() not in known:
        raise DflashError(
            f"no GPU is called {one_line(name, 40)!r}{nearest(name.lower(), list(known))}",
            where="--gpu",
            fix=f"choose one of {', '.join(known)}",
            usage=True,
        )
    return known[name.lower()]


@cache
def _read(path: Path) -> _Table:
    table = _Table({}, {})
    for name, raw in read_yaml(path).items():
        gpus = [_gpu(name, gpu, fields) for gpu, fields in raw.pop("gpus").items()]
        table.gpus.update({gpu.name: gpu for gpu in gpus})
        shared = raw.pop("shared_kib") * 1024
        table.arches[name] = Arch(
            name=name,
            largest_bytes=max(gpu.memory_bytes for gpu in gpus),
            formats=max((gpu.formats for gpu in gpus), key=len),
            shared_bytes=shared,
            **raw,
        )
    return table


def _gpu(arch: str, name: str, raw: dict[str, Any]) -> Gpu:
    tflops = {precision: rate * 1e12 for precision, rate in raw.pop("tflops").items()}
    return Gpu(
        name=name,
        arch=arch,
        memory_bytes=raw.pop("memory_gb") * 10**9,
        bandwidth=raw.pop("bandwidth") * 1e12,
        bf16=tflops["bf16"],
        fp8=tflops.get("fp8"),
        fp4=tflops.get("fp4"),
        link_bandwidth=raw.pop("link_gb") * 1e9,
        **raw,
    )

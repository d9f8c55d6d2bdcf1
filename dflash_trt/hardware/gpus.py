"""The GPUs and architectures that are known, from gpus.yaml."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from dflash_trt.core.formats import QUANTIZED, Format, MathPrecision
from dflash_trt.core.yaml_files import read_yaml
from dflash_trt.errors import DflashError, closest, one_line

GPUS_FILE = Path(__file__).with_name("gpus.yaml")
DEFAULT_ARCH = "sm_120"
LEAST_MEMORY = 0.9
"""Of what a data sheet states: drivers keep some of it for themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """What the data sheet promises of one GPU; real programs get a fraction of it.

    Args:
        name, title: what `--gpu` takes, and what people call it.
        arch: the architecture that engines are built for, as "sm_100".
        memory_bytes: decimal, as data sheets count.
        bandwidth: of its memory, bytes/s.
        bf16, fp8, fp4: dense FLOP/s of its tensor cores (a multiply-add counts two); None where
            they do not have that precision.
        link: what joins it to other GPUs.
        link_bandwidth: bytes/s of one GPU in one direction.
        link_gpus: how many GPUs that link joins.
        node_gpus: how many one machine has.
        source: where the figures are from.
        sms: multiprocessors; None where no source states them.
    """

    name: str
    title: str
    arch: str
    memory_bytes: int
    bandwidth: float
    bf16: float
    fp8: float | None
    fp4: float | None
    link: str
    link_bandwidth: float
    link_gpus: int
    node_gpus: int
    source: str
    sms: int | None = None

    def multiplies(self, form: Format) -> bool:
        """Whether its tensor cores take weights in `form`: of four bits where they have FP4."""
        if form is Format.BF16:
            return True
        return (self.fp8 if form is Format.FP8 else self.fp4) is not None

    def math(self, form: Format) -> MathPrecision:
        """What it multiplies weights of `form` in: bf16 where they must be unpacked first."""
        return form.math if self.multiplies(form) else "bf16"

    def flops(self, form: Format) -> float:
        """Dense FLOP/s that it promises for weights in `form`."""
        rates = {"bf16": self.bf16, "fp8": self.fp8, "fp4": self.fp4}
        return rates[self.math(form)] or self.bf16

    @property
    def formats(self) -> tuple[Format, ...]:
        """The formats of quantised linears that it multiplies."""
        return tuple(form for form in QUANTIZED if self.multiplies(form))


@dataclass(frozen=True, slots=True, kw_only=True)
class Arch:
    """What all GPUs of one architecture have in common.

    Args:
        name: as "sm_100".
        devices: its GPUs, as people call them.
        largest_bytes: memory of the largest of them: what does not fit there fits nowhere.
        formats: the quantised formats that its tensor cores multiply.
        tensorrt_rtx: its name in TensorRT-RTX's ComputeCapability; None where it has none.
        kernels: what this project's kernels are compiled for, as "sm_100a"; None without kernels.
        draft_attention: TensorRT-LLM's best backend for a draft's attention.
        shared_bytes: the most shared memory of one block that opts in to more than the next.
        plain_shared_bytes: the most of one block that opts in to nothing.
        registers, thread_registers: the most 32-bit registers of one block, and of one thread.
        threads: the most of one block.
        sm_shared_bytes, sm_threads: what all resident blocks of a multiprocessor share.
        ptx: the highest version of PTX that drivers are given, as (8, 8).
        source, limits_source: where the figures are from; those of every architecture.
    """

    name: str
    devices: str
    largest_bytes: int
    formats: tuple[Format, ...] = ()
    tensorrt_rtx: str | None = None
    kernels: str | None = None
    draft_attention: str = "VANILLA"
    shared_bytes: int = 0
    plain_shared_bytes: int = 0
    registers: int = 0
    thread_registers: int = 0
    threads: int = 0
    sm_shared_bytes: int = 0
    sm_threads: int = 0
    ptx: tuple[int, int] = (0, 0)
    source: str = ""
    limits_source: str = ""

    @property
    def number(self) -> int:
        """Its compute capability without the point, as 100."""
        return int(self.name.removeprefix("sm_"))


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
        what = f"no GPU is called {one_line(name, 40)!r}{_hint(name.lower(), known)}"
        fix = f"choose one of {', '.join(known)}"
        raise DflashError(what, where="--gpu", fix=fix, usage=True)
    return known[name.lower()]


def _hint(name: str, known: dict[str, Gpu]) -> str:
    """What may have been meant: a profile without its number, or the nearest and its memory."""
    gpu, x, number = name.rpartition("x")
    if gpu in known and number.isdecimal():
        return f" (leave out {x + number!r}: the GPU is {gpu!r})"
    close = closest(name, list(known))
    if close is None:
        return ""
    return f" (nearest: {close!r}, of {known[close].memory_bytes / 1e9:,.0f} GB)"


def match_gpu(name: str, arch: str, memory_bytes: int) -> Gpu | None:
    """The GPU that a driver calls `name`, as "NVIDIA H100 80GB HBM3"; None: the file has none.

    One with less memory than the file states is another one: an A100 of 40 GB, a slice of a GPU.
    """
    words = set(re.split("[^a-z0-9]+", name.lower()))
    for gpu in _read(GPUS_FILE).gpus.values():
        is_named = words.issuperset(gpu.name.split("-")) and gpu.arch == arch
        if is_named and memory_bytes > LEAST_MEMORY * gpu.memory_bytes:
            return gpu
    return None


@cache
def _read(path: Path) -> _Table:
    table = _Table({}, {})
    known = read_yaml(path)
    common = known.pop("every_architecture")
    common["ptx"] = tuple(map(int, common.pop("ptx").split(".")))
    for name, own in known.items():
        raw = common | own
        gpus = [_gpu(name, gpu, fields) for gpu, fields in raw.pop("gpus").items()]
        table.gpus.update({gpu.name: gpu for gpu in gpus})
        for kind in ("shared", "plain_shared", "sm_shared"):
            raw[f"{kind}_bytes"] = raw.pop(f"{kind}_kib") * 1024
        table.arches[name] = Arch(
            name=name,
            largest_bytes=max(gpu.memory_bytes for gpu in gpus),
            formats=max((gpu.formats for gpu in gpus), key=len),
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
        node_gpus=raw.pop("node_gpus", raw["link_gpus"]),
        **raw,
    )

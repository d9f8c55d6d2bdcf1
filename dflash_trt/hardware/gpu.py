"""One GPU's data sheet, and the GPUs that are known by name."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from dflash_trt.config import nearest, read_yaml
from dflash_trt.errors import DflashError, one_line

GPUS_FILE = Path(__file__).with_name("gpus.yaml")

MathPrecision = Literal["bf16", "fp8", "fp4"]
"""What tensor cores multiply in."""


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
        source: where the figures are from.
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
    source: str

    def flops(self, precision: MathPrecision) -> float:
        """Dense FLOP/s in `precision`, or in the next wider one that the tensor cores have."""
        if precision == "fp4" and self.fp4 is not None:
            return self.fp4
        if precision != "bf16" and self.fp8 is not None:
            return self.fp8
        return self.bf16


def gpu_names() -> list[str]:
    """Names that `find_gpu` knows, in the file's order."""
    return list(_read())


def find_gpu(name: str) -> Gpu:
    """The GPU called `name`.

    Raises:
        DflashError: none is; names the nearest.
    """
    known = _read()
    if name.lower() not in known:
        raise DflashError(
            f"no GPU is called {one_line(name, 40)!r}{nearest(name.lower(), list(known))}",
            where="--gpu",
            fix=f"choose one of {', '.join(known)}",
            usage=True,
        )
    return known[name.lower()]


@cache
def _read() -> dict[str, Gpu]:
    return {name: _gpu(name, raw) for name, raw in read_yaml(GPUS_FILE).items()}


def _gpu(name: str, raw: dict[str, Any]) -> Gpu:
    tflops = raw["tflops"]
    fp8, fp4 = tflops.get("fp8"), tflops.get("fp4")
    return Gpu(
        name=name,
        title=raw["title"],
        arch=raw["arch"],
        memory_bytes=raw["memory_gb"] * 10**9,
        bandwidth=raw["bandwidth"] * 1e12,
        bf16=tflops["bf16"] * 1e12,
        fp8=None if fp8 is None else fp8 * 1e12,
        fp4=None if fp4 is None else fp4 * 1e12,
        link=raw["link"],
        link_bandwidth=raw["link_gb"] * 1e9,
        link_gpus=raw["link_gpus"],
        source=raw["source"],
    )

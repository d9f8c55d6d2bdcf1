"""The parts of the check as a table, in order of worth: what is said first says most."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from dflash_plugins.table import FOLDERS

from dflash_trt.backends.tensorrt.library import TENSORRT, TENSORRT_RTX, Library
from dflash_trt.proof.gpu_check.cuda_probes import check_cuda, describe_machine
from dflash_trt.proof.gpu_check.engine_part import check_engines
from dflash_trt.proof.gpu_check.kernel_part import check_kernels, measure_kernels
from dflash_trt.proof.gpu_check.random_pairs import PAIRS, RandomPair
from dflash_trt.proof.gpu_check.runner import PartWork

# Nobody knows yet how long TensorRT takes to choose tactics for a pair.
ENGINE_SECONDS = 180
ACCURACY_SECONDS = {"block_attention": 90, "gated_delta_step": 60, "row_sample": 40}
SPEED_SECONDS = {"block_attention": 90}


@dataclass(frozen=True, slots=True)
class Part:
    """One part: a process of its own, so that a fault of the GPU ends no other.

    The record files it under its `name`; in the short form it is ended after `seconds`.
    """

    name: str
    seconds: float
    work: PartWork


MACHINE = Part("machine", 60, describe_machine)
"""Run first and each time: without it there is no check."""


def check_parts() -> list[Part]:
    """All parts but `MACHINE`.

    Kernels before engines: they need least. Of engines some of each library before the others,
    those with plugins first.
    """
    kernels = [
        Part(f"kernels: {folder}", ACCURACY_SECONDS.get(folder, 30), partial(check_kernels, folder))
        for folder in FOLDERS
    ]
    speeds = [
        Part(f"speed: {folder}", SPEED_SECONDS.get(folder, 30), partial(measure_kernels, folder))
        for folder in FOLDERS
    ]
    speeds.sort(key=lambda part: not part.name.endswith("block_attention"))
    plain = [*(pair for pair in PAIRS if not pair.needs_plugins), None]
    rtx, native = ([_engines(one, pair) for pair in plain] for one in (TENSORRT_RTX, TENSORRT))
    plugged = [_engines(TENSORRT, pair, plugins=True) for pair in (*PAIRS, None)]
    first = [*plugged[:2], rtx[0], native[0], speeds[0]]
    others = [*plugged[2:], *rtx[1:], *native[1:], *speeds[1:]]
    return [Part("CUDA", 30, check_cuda), *kernels, *first, *others]


def _engines(library: Library, pair: RandomPair | None, *, plugins: bool = False) -> Part:
    """Of each kind the first pair counts memory too."""
    kind = f"{library.name} with plugins" if plugins else library.name
    first = next(one for one in PAIRS if plugins or not one.needs_plugins)
    work = partial(check_engines, library, pair, plugins=plugins, counts_memory=pair is first)
    name = f"{kind}: {'demo pair' if pair is None else pair.name}"
    return Part(name, ENGINE_SECONDS, work)

"""The parts of the check as a table, in order of worth: what is said first says most."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from dflash_plugins.table import FOLDERS

from dflash_trt.backends.tensorrt.library import TENSORRT, TENSORRT_RTX, Library
from dflash_trt.proof.gpu_check.cuda_probes import check_cuda, describe_machine
from dflash_trt.proof.gpu_check.engine_part import PTX, check_engines, engines_run
from dflash_trt.proof.gpu_check.kernel_part import check_kernels, measure_kernels
from dflash_trt.proof.gpu_check.outcome import PartOutcome
from dflash_trt.proof.gpu_check.random_pairs import PAIRS, RandomPair
from dflash_trt.proof.gpu_check.setting import PartWork

BUDGET_SECONDS = 580
"""Ten minutes with the end of a part that does not heed its time."""
LONG_SECONDS = 3600
"""Of one part in the long form, which has no budget."""

# Nobody knows yet how long TensorRT takes to choose tactics for a pair.
ENGINE_SECONDS = 180
ACCURACY_SECONDS = {"block_attention": 90, "gated_delta_step": 60, "row_sample": 40}
SPEED_SECONDS = {"block_attention": 90}


@dataclass(frozen=True, slots=True)
class Part:
    """One part: a process of its own, so that a fault of the GPU ends no other.

    Args:
        name: unique; what the record files it under.
        seconds: when it is ended in the short form.
        instead_of: the part that makes it needless, unless that one's engines do not run.
    """

    name: str
    seconds: float
    work: PartWork
    instead_of: str | None = None

    def left_out(self, parts: Mapping[str, PartOutcome]) -> PartOutcome | None:
        """What stands for it where what `parts` found does not ask for it."""
        if self.instead_of is None:
            return None
        first = parts.get(self.instead_of, PartOutcome("not run"))
        if not first.is_final(is_long=False):
            return PartOutcome("not run", "whether engines of machine code run is not known")
        if first.status == "skipped":
            return PartOutcome("skipped", first.reason)
        if engines_run(first.probes):
            return PartOutcome("skipped", "PTX is for where engines of machine code do not run")
        return None


MACHINE = Part("machine", 60, describe_machine)
"""Run first and each time: without it there is no check."""


def check_parts() -> list[Part]:
    """All parts but `MACHINE`.

    Kernels before engines: they need least. Of engines one pair of each library before the others,
    those with plugins first, each before what its kernels' PTX is tried in.
    """
    kernels = [
        Part(f"kernels: {folder}", ACCURACY_SECONDS.get(folder, 30), partial(check_kernels, folder))
        for folder in FOLDERS
    ]
    speeds = [
        Part(f"speed: {folder}", SPEED_SECONDS.get(folder, 30), partial(measure_kernels, folder))
        for folder in FOLDERS
    ]
    plain = [pair for pair in PAIRS if not pair.needs_plugins]
    plugged = [
        _engines(TENSORRT, pair, plugins=True, ptx=ptx)
        for pair in (*PAIRS, None)
        for ptx in (False, True)
    ]
    native = [_engines(TENSORRT, pair) for pair in (*plain, None)]
    rtx = [_engines(TENSORRT_RTX, pair) for pair in (*plain, None)]
    attention = [one for one in speeds if one.name.endswith("block_attention")]
    others = [one for one in speeds if one not in attention]
    return [
        Part("CUDA", 30, check_cuda),
        *kernels,
        *plugged[:4],
        rtx[0],
        native[0],
        *attention,
        *plugged[4:],
        *rtx[1:],
        *native[1:],
        *others,
    ]


def _engines(
    library: Library, pair: RandomPair | None, *, plugins: bool = False, ptx: bool = False
) -> Part:
    """Of each kind the first pair counts memory too."""
    kind = f"{library.name} with plugins" if plugins else library.name
    first = next(one for one in PAIRS if plugins or not one.needs_plugins)
    work = partial(
        check_engines, library, pair, plugins=plugins, ptx=ptx, counts_memory=pair is first
    )
    name = f"{kind}: {'demo pair' if pair is None else pair.name}"
    return Part(name + PTX * ptx, ENGINE_SECONDS, work, instead_of=name if ptx else None)

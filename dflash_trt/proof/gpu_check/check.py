"""The parts of the check, in order of worth, run within a budget of time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from dflash_plugins.table import FOLDERS

from dflash_trt.backends.tensorrt.library import TENSORRT, TENSORRT_RTX, Library
from dflash_trt.core.progress import Progress
from dflash_trt.errors import DflashError, nearest, one_line
from dflash_trt.graph.form import Precision
from dflash_trt.hardware.cores import available_cores
from dflash_trt.proof.gpu_check.cuda_probes import check_cuda, describe_machine
from dflash_trt.proof.gpu_check.engine_part import (
    PAIRS,
    RandomPair,
    check_engines,
    check_programs,
)
from dflash_trt.proof.gpu_check.gpu_record import CheckRecord, PartOutcome, open_record
from dflash_trt.proof.gpu_check.kernel_part import (
    check_kernels,
    compile_kernels,
    measure_kernels,
    sanitize,
    stress_kernels,
)
from dflash_trt.proof.gpu_check.ratio_part import measure_ratio, time_steps
from dflash_trt.proof.gpu_check.runner import PartProcess, PartWork, run_in_child

BUDGET_SECONDS = 400
"""Seven minutes with the end of a part that does not heed its time."""
LONG_SECONDS = 3600
"""Of a part that was asked for by name: there is no budget."""
LEAST_SECONDS = 15
"""A part that would have less is not begun."""
MOST_AT_ONCE, SPARED_CORES = 12, 2
POLL_SECONDS = 0.05
# Nobody knows yet how long TensorRT takes to choose tactics for a pair.
ENGINE_SECONDS = 180
ATTENTION = "block_attention"
SHARES = {ATTENTION: 4, "gated_delta_step": 2, "row_sample": 2}
"""Processes that share an operation's accuracy; of others it takes one."""
STRESSED = ("row_sample", "accept")
SANITIZERS = (("memcheck", "row_sample"), ("memcheck", ATTENTION), ("racecheck", ATTENTION))


@dataclass(frozen=True, slots=True)
class Part:
    """One part: a process of its own, so that a fault of the GPU ends no other.

    The record files it under its `name`, which begins with its step; it is ended after `seconds`,
    unless asked for by name. What is timed, or watches the GPU's memory, `is_alone`.
    """

    name: str
    seconds: float
    work: PartWork
    is_alone: bool = True

    @property
    def step(self) -> str:
        return step_of(self.name)


def step_of(name: str) -> str:
    """The step of the part called `name`: what it begins with."""
    return name.partition(": ")[0]


def check_parts() -> list[Part]:
    """All parts: what needs PyTorch and CUDA alone, kernels, their speed, and TensorRT's engines.

    Of engines some of each library before the others, those with plugins first.
    """
    parts = [Part("CUDA", 30, check_cuda)]

    def add(name: str, seconds: float, work: Any, *given: Any, alone: bool = True) -> None:
        parts.append(Part(name, seconds, partial(work, *given), alone))

    for kind in (Precision.FLOAT32, Precision.BFLOAT16):
        add(f"torch: demo pair, {kind.value}", 60, check_programs, None, kind)
    add("ratio: demo pair", 45, measure_ratio)
    add("ratio: synthetic", 110, time_steps)
    for kind, pair in product((Precision.BFLOAT16, Precision.FLOAT32), PAIRS):
        add(f"torch: {pair.name}, {kind.value}", 60, check_programs, pair, kind, alone=False)
    for folder in FOLDERS:
        shares = SHARES.get(folder, 1)
        for share in range(shares):
            given, name = (folder, share, shares), f"{folder}, {share + 1} of {shares}"
            add(f"kernels: {name}", 120, check_kernels, *given, alone=False)
            add(f"compile: {name}", 90, compile_kernels, *given, alone=False)
    for folder in STRESSED:
        add(f"stress: {folder}", 60, stress_kernels, folder, alone=False)
    for tool, folder in SANITIZERS:
        add(f"sanitizers: {tool}, {folder}", 120, sanitize, tool, folder, alone=False)
    for folder in sorted(FOLDERS, key=lambda folder: folder != ATTENTION):
        add(f"speed: {folder}", 60 if folder == ATTENTION else 20, measure_kernels, folder)
    plain = [*(pair for pair in PAIRS if not pair.needs_plugins), None]
    rtx, native = ([_engines(one, pair) for pair in plain] for one in (TENSORRT_RTX, TENSORRT))
    plugged = [_engines(TENSORRT, pair, plugins=True) for pair in (*PAIRS, None)]
    return [*parts, *plugged[:2], rtx[0], native[0], *plugged[2:], *rtx[1:], *native[1:]]


def _engines(library: Library, pair: RandomPair | None, *, plugins: bool = False) -> Part:
    kind = f"{library.name} with plugins" if plugins else library.name
    name = f"{kind}: {'demo pair' if pair is None else pair.name}"
    return Part(name, ENGINE_SECONDS, partial(check_engines, library, pair, plugins=plugins))


def check_gpu(folder: Path, progress: Progress, only: Sequence[str] = ()) -> CheckRecord:
    """Runs what the record in `folder` does not have yet; it is written after every part.

    `only` names steps or parts that are run instead, known or not, for as long as they take.

    Raises:
        DflashError: there is no GPU; `folder` holds the record of another, or a name of `only` is
            no step's and no part's (usage).
        KeyboardInterrupt, SystemExit: the user's; the record has the parts that had ended.
    """
    parts = check_parts()
    known_names = [*dict.fromkeys(one for part in parts for one in (part.step, part.name))]
    for name in only:
        if name not in known_names:
            what = f"no step is called {one_line(name, 80)!r}{nearest(name, known_names)}"
            raise DflashError(what, where="--only", usage=True)
    ends = time.monotonic() + BUDGET_SECONDS
    progress.stage("machine", None)
    machine = run_in_child(describe_machine, 60)  # without it there is no check
    if machine.status != "done":
        if machine.status == "failed":
            raise DflashError(str(machine.reason))
        what = f"the GPU does not answer: {machine.reason}"
        raise DflashError(what, fix="nvidia-smi says whether it is well")
    record = open_record(folder, machine.probes[0].to_json()["figures"])
    folder.mkdir(parents=True, exist_ok=True)
    record.save(folder)  # a folder that cannot be written to is known before minutes of work
    if only:
        chosen = [part for part in parts if not {part.name, part.step}.isdisjoint(only)]
        _run(chosen, record, folder, progress, None)
    else:
        known = {name for name, one in record.parts.items() if one.status != "not run"}
        _run([part for part in parts if part.name not in known], record, folder, progress, ends)
    return record


def _run(
    parts: Sequence[Part],
    record: CheckRecord,
    folder: Path,
    progress: Progress,
    ends: float | None,
) -> None:
    """Runs parts in their order, beside each other where they may be, until `ends`."""
    waiting, running = list(parts), dict[str, tuple[Part, PartProcess]]()
    lanes = min(MOST_AT_ONCE, max(1, available_cores() - SPARED_CORES))
    try:
        while waiting or running:
            while waiting and _may_begin(waiting[0], [part for part, _ in running.values()], lanes):
                part = waiting.pop(0)
                left = LONG_SECONDS if ends is None else min(part.seconds, ends - time.monotonic())
                steps = (one for name, one in record.parts.items() if part.step == step_of(name))
                lacks = next((one.reason for one in steps if one.status == "skipped"), None)
                # What one part of a step lacks all lack; but in float32 nothing is compiled.
                if lacks and ends is not None and part.step != "torch":
                    record.parts[part.name] = PartOutcome("skipped", lacks)
                    record.save(folder)
                elif left < LEAST_SECONDS:
                    record.parts[part.name] = PartOutcome("not run", "out of time")
                    record.save(folder)
                else:
                    progress.stage(part.name, None)
                    running[part.name] = part, PartProcess(part.work, left)
            for name, (_, process) in list(running.items()):
                if process.is_over(POLL_SECONDS):
                    record.parts[name] = process.end()
                    del running[name]
                    record.save(folder)
    finally:
        for _, process in running.values():
            process.end()


def _may_begin(part: Part, running: Sequence[Part], lanes: int) -> bool:
    if part.is_alone or any(one.is_alone for one in running):
        return not running
    return len(running) < lanes

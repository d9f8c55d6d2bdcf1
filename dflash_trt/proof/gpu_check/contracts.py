"""What this project takes CUDA, TensorRT and its plugin layer to do, and which probe shows it.

The tests' stand-ins pretend to be these three, by what headers, documents and the wheels say. This
is the list of what they believe: a belief that turns out wrong says which stand-in (tests/standins:
cuda.py and driver.py, tensorrt.py, plugin_core.py) is to be mended, and which tests had proven
nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from dflash_trt.proof.gpu_check import cache_probes as caches
from dflash_trt.proof.gpu_check import cuda_probes as cuda
from dflash_trt.proof.gpu_check import engine_part as engines
from dflash_trt.proof.gpu_check import executor_probes as executors
from dflash_trt.proof.gpu_check import shape_probes as shapes
from dflash_trt.proof.gpu_check.record import PartOutcome

KERNELS, PLUGINS = "kernels: ", "TensorRT with plugins: "


class Contract(NamedTuple):
    """One belief about a `party`.

    `probe` is the name of the probes that show it, "" any probe; `part` is how the names of the
    parts begin in which they count.
    """

    party: str
    belief: str
    probe: str
    part: str = ""


CONTRACTS = [
    Contract("CUDA", belief, probe)
    for belief, probe in {
        "cudaMalloc aligns to 256 bytes": cuda.ALIGNED,
        "asynchronous copies of one stream run one after another": cuda.IN_ORDER,
        "an event waits for what was enqueued before it, not behind it": cuda.EVENTS,
        "2-D copies and memsets touch `width` bytes of each row": cuda.PITCHES,
        "captured copies run at each launch, over the memory of then": cuda.GRAPHS,
        "a capture broken off leaves the stream usable": cuda.CAPTURES,
        "cudaMemGetInfo follows allocations": cuda.FREED,
    }.items()
]
CONTRACTS += [
    Contract("CUDA", belief, "", part)
    for belief, part in {
        "the driver takes our kernels and passes pointers and int32 in the order of their "
        "entry": KERNELS,
        "a kernel gets more than 48 KiB of shared memory once it has opted in": f"{KERNELS}"
        "block_attention",
    }.items()
]
CONTRACTS += [
    Contract("TensorRT", belief, probe)
    for belief, probe in {
        "a build hands its engine to a stream writer in pieces": engines.BUILDS,
        "an engine names its tensors, -1 for dynamic extents, and the inputs of its own in-place "
        "updates": engines.LOADS,
        "messages of errors reach the logger in Python, then None": engines.REFUSES,
        "an engine opens again, with kernels it kept": engines.REOPENS,
        "an aliased output is written where the input lies": caches.IN_PLACE,
        "a cache update writes no row but the call's, idle ones included": caches.NEIGHBOURS,
        "lower-right causality counts from each row's own length": executors.OWN_LENGTH,
        "a context takes any shape of its profile in any order, in memory that contexts "
        "share": shapes.CHANGING,
        "a run that has settled can be captured, and replays while its context is left "
        "alone": executors.REPLAY,
        "contexts of a few shapes, run in turn, take no memory for good": shapes.DRIFT,
        "TopK gives the highest first, ties in any order": executors.CANDIDATES,
    }.items()
]
CONTRACTS += [
    Contract("plugins", belief, probe, PLUGINS)
    for belief, probe in {
        "a plugin is found by name, asked for types, then for shapes": engines.BUILDS,
        "an engine takes a cubin where the documentation says PTX": engines.MACHINE_CODE,
        "the cache that a plugin's output aliases is updated in place, though nothing says "
        "so": caches.IN_PLACE,
        "a launch gets inputs, then int32 extras, then outputs, on the grid that we "
        "computed": shapes.CHANGING,
        "kernels read no row that a sequence does not hold": caches.DIRTY_PAGES,
        "row_sample draws what the runtime would": executors.DRAWS,
        "accept lets a step begin before the host has seen the last": executors.AHEAD,
        "nor do the kernels of plugins in them": shapes.DRIFT,
    }.items()
]


def judge_contracts(parts: Mapping[str, PartOutcome]) -> list[dict[str, Any]]:
    """Each contract with whether it holds: None where no probe of it has run."""
    verdicts = {
        (name, probe.name): probe.passed
        for name, outcome in parts.items()
        for probe in outcome.probes
        if probe.passed is not None
    }

    def holds(one: Contract) -> bool | None:
        found = [
            passed
            for (name, probe), passed in verdicts.items()
            if name.startswith(one.part) and one.probe in ("", probe)
        ]
        return all(found) if found else None

    return [
        {
            "party": one.party,
            "belief": one.belief,
            "probe": one.probe or f"those of {one.part.removesuffix(': ')}",
            "holds": holds(one),
        }
        for one in CONTRACTS
    ]

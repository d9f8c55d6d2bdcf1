"""What this project takes CUDA, TensorRT and its plugin layer to do, and which probe shows it.

No GPU ran the code, so the tests' stand-ins pretend to be these three, by what headers, documents
and the wheels say. This is the list of what they believe: a belief that turns out wrong says which
stand-in is to be mended, and which tests had proven nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dflash_trt.proof.gpu_check import cache_probes as caches
from dflash_trt.proof.gpu_check import cuda_probes as cuda
from dflash_trt.proof.gpu_check import engine_part as engines
from dflash_trt.proof.gpu_check import executor_probes as executors
from dflash_trt.proof.gpu_check import shape_probes as shapes
from dflash_trt.proof.gpu_check.outcome import PartOutcome

Party = Literal["CUDA", "TensorRT", "plugins"]


@dataclass(frozen=True, slots=True)
class Contract:
    """One belief.

    Args:
        party: whose behaviour it is; its stand-in is tests/standins/{cuda,driver}.py, tensorrt.py
            or plugin_core.py.
        belief: what the stand-in does, and the product relies on.
        probe: the name of the probes that show it; "" any probe of the parts.
        part: how the names of the parts begin in which they count.
    """

    party: Party
    belief: str
    probe: str
    part: str = ""


KERNELS, PLUGINS = "kernels: ", "TensorRT with plugins: "

CONTRACTS = (
    Contract("CUDA", "cudaMalloc aligns to 256 bytes", cuda.ALIGNED),
    Contract("CUDA", "asynchronous copies of one stream run one after another", cuda.IN_ORDER),
    Contract("CUDA", "an event waits for what was enqueued before it, not behind it", cuda.EVENTS),
    Contract("CUDA", "2-D copies and memsets touch `width` bytes of each row", cuda.PITCHES),
    Contract("CUDA", "captured copies run at each launch, over the memory of then", cuda.GRAPHS),
    Contract("CUDA", "a capture broken off leaves the stream usable", cuda.CAPTURES),
    Contract("CUDA", "cudaMemGetInfo follows allocations", cuda.FREED),
    Contract(
        "CUDA",
        "the driver takes our kernels and passes pointers and int32 in the order of their entry",
        "",
        KERNELS,
    ),
    Contract(
        "CUDA",
        "a kernel gets more than 48 KiB of shared memory once it has opted in",
        "",
        f"{KERNELS}block_attention",
    ),
    Contract("TensorRT", "a build hands its engine to a stream writer in pieces", engines.BUILDS),
    Contract(
        "TensorRT",
        "an engine names its tensors, -1 for dynamic extents, and the inputs of its own in-place "
        "updates",
        engines.LOADS,
    ),
    Contract(
        "TensorRT", "messages of errors reach the logger in Python, then None", engines.REFUSES
    ),
    Contract("TensorRT", "an engine opens again, with kernels it kept", engines.REOPENS),
    Contract("TensorRT", "an aliased output is written where the input lies", caches.IN_PLACE),
    Contract(
        "TensorRT",
        "a cache update writes no row but the call's, idle ones included",
        caches.NEIGHBOURS,
    ),
    Contract(
        "TensorRT", "lower-right causality counts from each row's own length", executors.OWN_LENGTH
    ),
    Contract(
        "TensorRT",
        "a context takes any shape of its profile in any order, in memory that contexts share",
        shapes.CHANGING,
    ),
    Contract(
        "TensorRT",
        "a run that has settled can be captured, and replays while its context is left alone",
        executors.REPLAY,
    ),
    Contract(
        "TensorRT", "contexts of a few shapes, run in turn, take no memory for good", shapes.DRIFT
    ),
    Contract("TensorRT", "TopK gives the highest first, ties in any order", executors.CANDIDATES),
    Contract(
        "plugins",
        "a plugin is found by name, asked for types, then for shapes",
        engines.BUILDS,
        PLUGINS,
    ),
    Contract(
        "plugins",
        "an engine takes a cubin where the documentation says PTX",
        engines.MACHINE_CODE,
        PLUGINS,
    ),
    Contract(
        "plugins",
        "the cache that a plugin's output aliases is updated in place, though nothing says so",
        caches.IN_PLACE,
        PLUGINS,
    ),
    Contract(
        "plugins",
        "a launch gets inputs, then int32 extras, then outputs, on the grid that we computed",
        shapes.CHANGING,
        PLUGINS,
    ),
    Contract("plugins", "kernels read no row that a sequence does not hold", caches.DIRTY_PAGES),
    Contract("plugins", "row_sample draws what the runtime would", executors.DRAWS),
    Contract(
        "plugins", "accept lets a step begin before the host has seen the last", executors.AHEAD
    ),
    Contract("plugins", "nor do the kernels of plugins in them", shapes.DRIFT, PLUGINS),
)


def judge_contracts(parts: Mapping[str, PartOutcome]) -> list[dict[str, Any]]:
    """Each contract with whether it holds: None where no probe of it has run.

    Where engines of machine code do not run, what holds is what holds of those of PTX, but for the
    contract about machine code.
    """
    replaced = {
        (name.removesuffix(engines.PTX), probe.name)
        for name, outcome in parts.items()
        if name.endswith(engines.PTX)
        for probe in outcome.probes
        if probe.passed is not None and probe.name != engines.MACHINE_CODE
    }
    judged = []
    for one in CONTRACTS:
        verdicts = [
            probe.passed
            for name, outcome in parts.items()
            if name.startswith(one.part)
            for probe in outcome.probes
            if probe.passed is not None and one.probe in ("", probe.name)
            if (name, probe.name) not in replaced
        ]
        judged.append(
            {
                "party": one.party,
                "belief": one.belief,
                "probe": one.probe or f"those of {one.part.removesuffix(': ')}",
                "holds": all(verdicts) if verdicts else None,
            }
        )
    return judged

"""What this project takes CUDA, TensorRT and its plugin layer to do, and which probe shows it.

The tests' stand-ins (tests/standins) pretend to be these three, by what headers, documents and the
wheels say. A belief that turns out wrong says which stand-in is to be mended, and which tests had
proven nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from dflash_trt.proof.gpu_check.gpu_record import PartOutcome

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


_BUILDS, _IN_PLACE = "engines build", "caches are updated where they lie"
_CHANGING = "calls of changing shape give the CPU's logits"
_DRIFT = "changes of shape keep no memory"
_CUDA = {
    "cudaMalloc aligns to 256 bytes": "device memory is aligned for TensorRT",
    "asynchronous copies of one stream run one after another": (
        "copies run in the order of the stream"
    ),
    "an event waits for what was enqueued before it, not behind it": (
        "waiting for an event waits for what is before it"
    ),
    "2-D copies and memsets touch `width` bytes of each row": (
        "rows are copied and cleared within their pitch"
    ),
    "captured copies run at each launch, over the memory of then": (
        "a graph runs when it is launched, over what is there then"
    ),
    "a capture broken off leaves the stream usable": (
        "a capture that fails leaves the stream usable"
    ),
    "cudaMemGetInfo follows allocations": "memory that is freed is free again",
}
_LAUNCHES = {
    "the driver takes our kernels and passes pointers and int32 in the order of their entry": "",
    "a kernel gets more than 48 KiB of shared memory once it has opted in": "block_attention",
}
_TENSORRT = {
    "a build hands its engine to a stream writer in pieces": _BUILDS,
    "an engine names its tensors, -1 for dynamic extents, and the inputs of its own in-place "
    "updates": "engines load as their manifest says",
    "messages of errors reach the logger in Python, then None": (
        "a file that is no engine is refused, with a reason"
    ),
    "an engine opens again, with kernels it kept": (
        "engines open again with what was kept of the first time"
    ),
    "an aliased output is written where the input lies": _IN_PLACE,
    "a cache update writes no row but the call's, idle ones included": (
        "no row that a sequence holds is written again"
    ),
    "lower-right causality counts from each row's own length": (
        "causality counts from each row's own length"
    ),
    "a context takes any shape of its profile in any order, in memory that contexts "
    "share": _CHANGING,
    "a run that has settled can be captured, and replays while its context is left alone": (
        "CUDA graphs replay the step"
    ),
    "contexts of a few shapes, run in turn, take no memory for good": _DRIFT,
    "TopK gives the highest first, ties in any order": "candidates draw what whole rows draw",
}
_PLUGINS = {
    "a plugin is found by name, asked for types, then for shapes": _BUILDS,
    "an engine takes a cubin where the documentation says PTX": (
        "TensorRT takes kernels as machine code"
    ),
    "the cache that a plugin's output aliases is updated in place, though nothing says "
    "so": _IN_PLACE,
    "a launch gets inputs, then int32 extras, then outputs, on the grid that we "
    "computed": _CHANGING,
    "kernels read no row that a sequence does not hold": (
        "what an earlier owner left in a page is not seen"
    ),
    "row_sample draws what the runtime would": "engines draw what the runtime would",
    "accept lets a step begin before the host has seen the last": "looking ahead changes no token",
    "nor do the kernels of plugins in them": _DRIFT,
}
CONTRACTS = [
    *(Contract("CUDA", belief, probe) for belief, probe in _CUDA.items()),
    *(Contract("CUDA", belief, "", KERNELS + folder) for belief, folder in _LAUNCHES.items()),
    *(Contract("TensorRT", belief, probe) for belief, probe in _TENSORRT.items()),
    *(Contract("plugins", belief, probe, PLUGINS) for belief, probe in _PLUGINS.items()),
]


def judge_contracts(parts: Mapping[str, PartOutcome]) -> list[dict[str, Any]]:
    """Each contract with whether it holds: None where no probe of it has run."""
    verdicts = [
        (name, probe.name, probe.passed)
        for name, outcome in parts.items()
        for probe in outcome.probes
        if probe.passed is not None
    ]
    judged = []
    for one in CONTRACTS:
        found = [
            passed
            for name, probe, passed in verdicts
            if name.startswith(one.part) and one.probe in ("", probe)
        ]
        shown_by = one.probe or f"those of {one.part.removesuffix(': ')}"
        holds = all(found) if found else None
        belief = {"party": one.party, "belief": one.belief}
        judged.append({**belief, "probe": shown_by, "holds": holds})
    return judged

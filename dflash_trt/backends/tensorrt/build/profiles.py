"""Optimisation profiles: the shapes an engine is built for.

B sequences, S rows each, R logit rows, as in graph/bindings.py. A call uses one profile:
a prefill chunk of one sequence, or a decode step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from dflash_trt.backends.tensorrt.library import Library
from dflash_trt.core.limits import Limits
from dflash_trt.graph.bindings import GraphName

FEW_SEQUENCES = 2
"""Steps of so many or fewer have a profile of their own where kernels are timed: TensorRT does that
at a profile's usual sizes, and what is fastest for one sequence may take twice as long for 16."""


class Span(NamedTuple):
    """Smallest, most usual and largest size of an axis."""

    low: int
    usual: int
    high: int


@dataclass(frozen=True, slots=True)
class Profile:
    """The spans of a profile's axes, by their names in the graphs."""

    name: str
    axes: Mapping[str, Span]
    is_step: bool = True


def profiles(graph: GraphName, limits: Limits, library: Library) -> list[Profile]:
    """Decode steps, preceded by prefill chunks for the graphs that have them."""
    block = limits.block_size
    if graph == "draft":  # a block is an anchor and at least one draft
        return _steps(limits.max_batch, {"S": Span(2, block, block)}, library)
    rows = Span(1, block, block)
    chunk = limits.prefill_chunk
    # A chunk needs the logits of its last row; more rows would only reserve memory, [R,V] floats.
    picked = Span(1, 1, min(block, chunk))
    prefill = {"B": Span(1, 1, 1), "S": Span(1, chunk, chunk), "R": picked}
    steps = _steps(limits.max_batch, {"S": rows, "R": rows}, library)
    return [Profile("prefill", prefill, is_step=False), *steps]


def _steps(batch: int, axes: Mapping[str, Span], library: Library) -> list[Profile]:
    """Decode steps of up to `batch` sequences."""
    # TensorRT-RTX chooses kernels at run time, for the shape that comes.
    if library.is_rtx or batch <= FEW_SEQUENCES:
        return [Profile("decode", {"B": Span(1, 1, batch), **axes})]
    few = Profile("decode", {"B": Span(1, 1, FEW_SEQUENCES), **axes})
    least = FEW_SEQUENCES + 1
    # Batches are doublings: the middle one, so that neither end is far.
    usual = 1 << round(math.log2(least * batch) / 2)
    return [few, Profile("decode_many", {"B": Span(least, min(usual, batch), batch), **axes})]


def choose_profile(known: Sequence[Profile], sizes: Mapping[str, int]) -> int | None:
    """Index of the tightest of `known` that takes a call of these axis sizes; None if none does.

    Of equally tight ones the steps'.
    """
    fitting = [
        index
        for index, profile in enumerate(known)
        if all(span.low <= sizes[axis] <= span.high for axis, span in profile.axes.items())
    ]
    return min(
        fitting,
        key=lambda index: (known[index].axes["S"].high, not known[index].is_step),
        default=None,
    )


def add_profile(builder: Any, config: Any, network: Any, profile: Profile) -> None:
    """Adds `profile` to a TensorRT builder configuration, for every input of `network`."""
    native = builder.create_optimization_profile()
    for index in range(network.num_inputs):
        tensor = network.get_input(index)
        spans = [
            Span(size, size, size) if size >= 0 else profile.axes[tensor.get_dimension_name(axis)]
            for axis, size in enumerate(tensor.shape)
        ]
        native.set_shape(tensor.name, *map(list, zip(*spans, strict=True)))
    config.add_optimization_profile(native)

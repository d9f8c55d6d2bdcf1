"""Looking ahead: a decode step that is under way before anyone asks for it.

Where the target draws and accepts, the next step's inputs are on the device when a step ends, so
the next step is enqueued at once and runs while the host reads the tokens. A call that asks for
anything else of its slots drops it; calls of other slots pass it by. Why that is safe, with pages
too, and not where layers are recurrent: docs/design/engines.md.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from dflash_trt.backends.base import Scores, StepCall
from dflash_trt.backends.device.bound_calls import BoundCall, Results, ResultSide, Staging
from dflash_trt.backends.device.device_caches import DevicePages
from dflash_trt.backends.device.padding import Frame
from dflash_trt.graph.bindings import BLOCK_IDS, CACHE_START, NEW_START, NEXT_BLOCK_IDS
from dflash_trt.hardware.device import Device


@dataclass(slots=True, eq=False)
class Step:
    """What a speculative step is asked for, and what is bound for what it runs as.

    Of one that is under way `side` is where its results go.
    """

    bound: BoundCall
    call: StepCall
    frame: Frame
    side: ResultSide | None = None

    def equals(self, other: Step) -> bool:
        """Whether the two are one step; of both, the arguments have to be known by now."""
        mine, others = self.call, other.call
        assert mine.sampling is not None and others.sampling is not None
        return (
            self.bound is other.bound
            and mine.first_slot == others.first_slot
            and np.array_equal(mine.anchors, others.anchors)
            and np.array_equal(mine.starts, others.starts)
            and np.array_equal(mine.sampling, others.sampling)
        )


class Lookahead:
    """At most one step ahead for each range of slots that decodes together.

    Args:
        device: whose stream steps are enqueued in.
        inputs, results: what all calls read and write.
        pages: the paged caches; None where they are linear.

    `started` counts the steps enqueued ahead of a call, `dropped` those that no call asked for.
    """

    def __init__(
        self, device: Device, inputs: Staging, results: Results, pages: DevicePages | None
    ) -> None:
        self._device = device
        self._inputs = inputs
        self._results = results
        self._pages = pages
        # In turn: one may still be on its way to the device while the next is written.
        self._tables = (
            [] if pages is None else [device.allocate_host(inputs.size) for _ in range(2)]
        )
        self._begun: list[Step] = []
        self._unknown: Step | None = None
        self._on_device: tuple[BoundCall, int] | None = None
        self.started = self.dropped = 0

    def fills(self, bound: BoundCall, first_slot: int) -> None:
        """Says whose inputs and results the device's buffers hold, once all enqueued is done."""
        self._on_device = bound, first_slot

    def has_inputs(self, step: Step) -> bool:
        """Whether what goes on from `step` finds its inputs on the device."""
        if self._on_device is None:
            return False
        bound, first_slot = self._on_device  # over pages one binding serves all slots
        return bound is step.bound and first_slot == step.call.first_slot

    def start(self, step: Step) -> None:
        """Enqueues the step behind `step`, which has been enqueued or taken just now.

        It replays the call's graph, whose contexts nothing else binds. Idle sequences begin where
        they did: they settle tokens as well, and would end up behind their caches.
        """
        bound, call, live, host = step.bound, step.call, step.frame.live, self._results.host
        inputs, outputs = bound.inputs, bound.outputs
        assert call.sampling is not None
        if self._pages is not None:
            # The buffer of page tables was last read two starts ago.
            self._tables.reverse()
            memory, names = self._tables[0], inputs.page_tables
            for name in names:
                self._pages.fill(name, inputs.view(memory, name), call.slots)
            offset, end = inputs.spans[names[0]][0], inputs.spans[names[-1]][1]
            self._device.upload(self._inputs.address + offset, memory[offset:end])
        for name, source in ((BLOCK_IDS, NEXT_BLOCK_IDS), (CACHE_START, NEW_START)):
            begin, size = inputs.part(name, live)
            offset, _ = outputs.part(source, live)
            self._device.copy(self._inputs.address + begin, self._results.address + offset, size)
        # Views: what the device goes on with is known once `step` has been waited for.
        anchors = outputs.view(host, NEXT_BLOCK_IDS)[live, 0]
        starts = outputs.view(host, NEW_START)[live]
        sampling = call.sampling.copy()
        following = replace(call, anchors=anchors, starts=starts, sampling=sampling)
        assert bound.graph is not None
        self._device.launch(bound.graph)
        side = self._results.download_ahead(bound.copied(Scores.NONE))
        self._unknown = Step(bound, following, step.frame, side)
        self._begun.append(self._unknown)
        self.started += 1

    def know(self) -> None:
        """Keeps what the step begun last goes on with, which the call that began it has told."""
        if (step := self._unknown) is not None:
            call, self._unknown = step.call, None
            step.call = replace(call, anchors=call.anchors.copy(), starts=call.starts.copy())

    def take(self, step: Step) -> bool:
        """Whether `step` is one that is under way, whose results are then the current ones.

        More of it than its choices must not be wanted: the rest stays on the device.
        """
        begun = next((one for one in self._begun if one.equals(step)), None)
        if begun is None:
            return False
        assert begun.side is not None
        self._begun.remove(begun)
        self._results.turn(begun.side)
        return True

    def drop(self, slots: range | None = None) -> None:
        """Forgets the steps under way, those of `slots` or all; they still run to their ends."""
        for step in self._begun.copy():
            own = step.call.slots
            if slots is None or (own.start < slots.stop and slots.start < own.stop):
                assert step.side is not None
                self._begun.remove(step)
                self._results.give_back(step.side)
                self.dropped += 1

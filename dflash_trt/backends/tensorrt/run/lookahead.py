"""Looking ahead: a decode step that is under way before anyone asks for it.

Where the engine draws and accepts, the next step's inputs are on the device when a step ends, so
the next step is enqueued at once and runs while the host reads the tokens. A call that asks for
anything else drops it. Why that is safe, with pages too: docs/design/looking-ahead.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dflash_trt.backends.base import Int64Array, Scores
from dflash_trt.backends.tensorrt.run.bound_calls import BoundCall, PackedTensors
from dflash_trt.backends.tensorrt.run.device_pages import DevicePages
from dflash_trt.backends.tensorrt.run.staging import Results, Staging
from dflash_trt.graph.bindings import BLOCK_IDS, NEW_START, NEXT_BLOCK_IDS, PAGE_TABLE
from dflash_trt.hardware.device import Device


@dataclass(frozen=True, slots=True)
class Step:
    """What a speculative step is asked for: `anchors` and `starts` [B], `sampling` [B,4].

    Its `call` stands for batch and block size.
    """

    call: BoundCall
    first_slot: int
    anchors: Int64Array
    starts: Int64Array
    sampling: Int64Array

    def equals(self, other: Step) -> bool:
        """Whether the two are one step; of both, the arguments have to be known by now."""
        return (
            self.call is other.call
            and self.first_slot == other.first_slot
            and np.array_equal(self.anchors, other.anchors)
            and np.array_equal(self.starts, other.starts)
            and np.array_equal(self.sampling, other.sampling)
        )


class Lookahead:
    """At most one step ahead of the caller.

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
            [] if pages is None else [device.allocate_host(pages.table_bytes) for _ in range(2)]
        )
        self._step: Step | None = None
        self.started = self.dropped = 0

    def start(self, step: Step) -> None:
        """Enqueues the step behind `step`, which has been enqueued or taken just now.

        It replays the call's graph, whose contexts nothing else binds.
        """
        call, host = step.call, self._results.host
        inputs, outputs = call.inputs, call.outputs
        assert call.graph is not None
        if self._pages is not None:
            self._upload_table(self._pages, inputs, step.first_slot)
        self._device.copy(
            self._inputs.address + inputs.offset(BLOCK_IDS),
            self._results.address + outputs.offset(NEXT_BLOCK_IDS),
            outputs.end(NEW_START) - outputs.offset(NEXT_BLOCK_IDS),
        )
        self._device.launch(call.graph)
        self._results.download(call.copied, ahead=True)
        self.started += 1
        # Views: what the device goes on with is known once `step` has been waited for.
        anchors = outputs.view(host, NEXT_BLOCK_IDS)[:, 0]
        starts = outputs.view(host, NEW_START)
        self._step = Step(call, step.first_slot, anchors, starts, step.sampling.copy())

    def take(self, step: Step, scores: Scores) -> bool:
        """Whether `step` is the one under way, whose results are then the current ones.

        If it is not, or more of it is wanted than a step ahead brings to the host, then the one
        under way is dropped.
        """
        expected = self._step
        if expected is None:
            return False
        if scores is not Scores.NONE or not expected.equals(step):
            self.drop()
            return False
        self._step = None
        self._results.turn()
        return True

    def _upload_table(self, pages: DevicePages, inputs: PackedTensors, first_slot: int) -> None:
        """Enqueues the way of the pages that are bound now to the device.

        The buffer was last read two starts ago. Of those steps only the one begun last can be
        under way: the call before waited for its own results, which lie behind the other's.
        """
        self._tables.reverse()
        offset, end = inputs.offset(PAGE_TABLE), inputs.end(PAGE_TABLE)
        memory = self._tables[0][: end - offset]
        pages.fill(memory.view(np.int32).reshape(inputs.shape(PAGE_TABLE)), first_slot)
        self._device.upload(self._inputs.address + offset, memory)

    def drop(self) -> None:
        """Forgets the step under way, if any; it still runs to its end."""
        if self._step is not None:
            self._step = None
            self.dropped += 1

"""An executor whose idle rows overflow: who reads one gets NaN, which no output hides."""

from __future__ import annotations

from typing import Any

from dflash_trt.backends.base import SpeculationOutput, StepCall, TargetCall, TargetOutput
from dflash_trt.backends.device.executor import DeviceExecutor
from tests.backends.tensorrt.machine import Machine


class Overflowing:
    """What idle rows leave in linear caches becomes NaN when a call ends.

    Those are rows that are not zero behind all that was written for a slot's own sequence, by the
    words of whoever calls. `overflown` counts them.
    """

    def __init__(self, machine: Machine, executor: DeviceExecutor) -> None:
        self._machine, self._executor = machine, executor
        self._ends = [0] * executor.limits.max_batch
        self._is_linear = executor.limits.page_pool is None
        self.overflown = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def forward(self, call: TargetCall) -> TargetOutput:
        self._begin(call, call.rows)
        output = self._executor.forward(call)
        self._overflow()
        return output

    def speculate(self, call: StepCall) -> SpeculationOutput:
        self._begin(call, call.rows * (1 + call.ahead))
        output = self._executor.speculate(call)
        self._overflow()
        return output

    def move_slot(self, source: int, destination: int, length: int) -> None:
        self._executor.move_slot(source, destination, length)
        self._ends[destination] = length

    def release_slots(self, first_free: int) -> None:
        self._executor.release_slots(first_free)
        self._ends[first_free:] = [0] * len(self._ends[first_free:])

    def _begin(self, call: TargetCall | StepCall, rows: int) -> None:
        for slot, start in zip(call.slots, call.starts.tolist(), strict=True):
            self._ends[slot] = max(self._ends[slot], start + rows)

    def _overflow(self) -> None:
        for held in self._machine.caches(self._executor).values() if self._is_linear else ():
            for slot, end in enumerate(self._ends):
                rows = held[slot, :, end:]
                is_idle = (rows != 0).any(-1)
                self.overflown += int(is_idle.any())
                rows[is_idle] = float("nan")

"""An executor that measures its own running time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dflash_trt.backends.base import (
    Executor,
    ExecutorLimits,
    SpeculationOutput,
    StepCall,
    TargetCall,
    TargetOutput,
)


class TimedExecutor:
    """Passes every call on and adds its time to `seconds`."""

    def __init__(self, executor: Executor, clock: Callable[[], float]) -> None:
        self._executor = executor
        self._clock = clock
        self.seconds = 0.0

    @property
    def limits(self) -> ExecutorLimits:
        return self._executor.limits

    @property
    def is_bitwise(self) -> bool:
        return self._executor.is_bitwise

    def forward(self, call: TargetCall) -> TargetOutput:
        with self._measure():
            return self._executor.forward(call)

    def speculate(self, call: StepCall) -> SpeculationOutput:
        with self._measure():
            return self._executor.speculate(call)

    def move_slot(self, source: int, destination: int, length: int) -> None:
        with self._measure():
            self._executor.move_slot(source, destination, length)

    def release_slots(self, first_free: int) -> None:
        with self._measure():
            self._executor.release_slots(first_free)

    def close(self) -> None:
        self._executor.close()

    @contextmanager
    def _measure(self) -> Iterator[None]:
        started = self._clock()
        try:
            yield
        finally:
            self.seconds += self._clock() - started

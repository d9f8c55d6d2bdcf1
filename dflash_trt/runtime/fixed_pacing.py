"""Every step has the rows that its requests ask for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dflash_trt.backends.base import ExecutorLimits, TargetCall, TargetGraph
from dflash_trt.runtime.options import GeneratorOptions
from dflash_trt.runtime.state import RequestState
from dflash_trt.speculation.schedule import NO_SPECULATION


class FixedPacer:
    """Every step has the rows that its requests ask for; `fallback` decodes what does not draft."""

    def __init__(self, options: GeneratorOptions, limits: ExecutorLimits) -> None:
        self.fallback: TargetGraph = options.graph
        block = options.block_size or limits.block_size
        self._usual = block if options.speculation else NO_SPECULATION
        self._most = limits.block_size

    def block_size(self, batch: int) -> int:
        """Rows of a step of requests that name no block."""
        return self._usual

    def begin_step(self, states: Sequence[RequestState]) -> int:
        """The drafter's block: no bound, since no request may ask for more."""
        return self._most

    def count(self, rows: int, trials: int, accepted: int) -> None:
        """Nothing depends on it."""

    def end_step(self) -> None:
        """Nothing depends on it."""

    def prefill_graph(self, state: RequestState, batch: int) -> TargetGraph:
        return self.fallback

    def fill_gap(
        self,
        forward: Callable[[TargetCall], object],
        limits: ExecutorLimits,
        states: Sequence[RequestState],
        chunk_tokens: int,
    ) -> None:
        """Nothing: there are no gaps."""

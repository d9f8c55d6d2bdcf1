"""Pacers say how many rows the next step has: fixed, by a schedule, or live.

Outputs never depend on them, statistics do. `LivePacer` is the only part of the runtime that
decides by a clock: docs/design/pacing.md.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from statistics import median

from dflash_trt.backends.base import ExecutorLimits, TargetCall, TargetGraph
from dflash_trt.decoding.generator_options import GeneratorOptions
from dflash_trt.decoding.pacing import Pacer
from dflash_trt.decoding.schedule import NO_SPECULATION
from dflash_trt.decoding.state import RequestState

CREDIT, TRIAL_CREDIT, MOST_CREDIT = 10.0, 4.0, 24.0
"""Plain steps that drafts may lose: at first, after they were stopped, with all that they saved."""
LEAST_RATIO, MOST_RATIO = 1.2, 13.0
"""A drafted step never counts as cheaper, in plain steps; a dearer one is not tried."""
FIRST_PAUSE, LONGEST_PAUSE = 256, 4096
"""Plain steps before drafts are tried again; doubled each time that they fail."""
UNTIMED_STEPS, FIRST_PROBE, NEXT_PROBE = 4, 128, 1024
"""Drafted steps of a batch before plain ones are timed beside them."""
PROBE_STEPS = 4
_KEPT, _FEWEST = 9, 3
# Steps that are further apart may have run on a machine that did something else meanwhile.
_NEAR_STEPS = 32
_TICK = 1e-9


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


class StepRatios:
    """Time of a drafted step by batch, in steps without drafts.

    A step is compared with the latest of the other kind at the same batch; medians count. The
    first step of a batch and kind is left out: it may allocate, compile or capture.
    """

    def __init__(self, known: Iterable[tuple[int, float]]) -> None:
        self._steps = 0
        self._recent: dict[tuple[int, bool], deque[tuple[int, float]]] = {}
        self._found: dict[int, deque[float]] = {}
        self._known = dict(known)

    def add(self, batch: int, seconds: float, *, drafted: bool) -> None:
        """Takes one step of `batch` sequences."""
        self._steps += 1
        recent = self._recent.get((batch, drafted))
        if recent is None:
            self._recent[batch, drafted] = deque(maxlen=_KEPT)
            return
        seconds = max(seconds, _TICK)
        recent.append((self._steps, seconds))
        others = self._recent.get((batch, not drafted), ())
        near = [other for step, other in others if self._steps - step <= _NEAR_STEPS]
        if not near:
            return
        found = self._found.setdefault(batch, deque(maxlen=_KEPT))
        found.append(seconds / median(near) if drafted else median(near) / seconds)
        if len(found) >= _FEWEST:
            self._known[batch] = median(found)

    def knows(self, batch: int) -> bool:
        """Whether steps of this batch, or of one like it, were timed."""
        return any(known <= batch < 2 * known for known in self._known)

    def at(self, batch: int) -> float:
        """The ratio at `batch`, or at the nearest that was timed; at least LEAST_RATIO.

        It grows with the batch: rows are free while weights are what takes time to read.
        """
        smaller = [known for known in self._known if known <= batch]
        nearest = max(smaller) if smaller else min(self._known, default=0)
        return max(self._known.get(nearest, LEAST_RATIO), LEAST_RATIO)


class LivePacer(FixedPacer):
    """Drafts the trained block, or nothing while drafts cost more than they bring.

    Plain steps inject into the drafter's context, so that it has no gaps.

    Args:
        clock: seconds, monotonic; read twice a step.
    """

    def __init__(
        self, options: GeneratorOptions, limits: ExecutorLimits, clock: Callable[[], float]
    ) -> None:
        super().__init__(options, limits)
        self._clock = clock
        self._ratios = StepRatios(options.step_ratios)
        # Drafted steps by batch, and their tokens, since they last paid; what they saved before.
        self._drafted: Counter[int] = Counter()
        self._tokens, self._saved = 0.0, 0.0
        self._credit = CREDIT
        # Drafts are off from this batch on, and have been for so many steps; None: nowhere.
        self._off_from: int | None = None
        self._rested, self._pause, self._is_trial = 0, FIRST_PAUSE, False
        self._until_probe: dict[int, int] = {}
        self._batch, self._started = 0, 0.0
        self._accepted: int | None = None

    def begin_step(self, states: Sequence[RequestState]) -> int:
        """The most rows of the step that `states`, all that decode, are about to make."""
        batch = self._batch = len(states)
        self._accepted = None
        # A step that costs more than a full block could bring is not even tried.
        is_hopeless = self._ratios.at(batch) > min(self._most, MOST_RATIO)
        if is_hopeless and not self._is_trial and not self._is_off(batch):
            self._stop(batch)
        is_probe = self._until_probe.get(batch, 1) <= 0
        self._started = self._clock()
        return NO_SPECULATION if is_probe or self._is_off(batch) else self._most

    def count(self, rows: int, trials: int, accepted: int) -> None:
        """Takes one request's part of the step, in which `accepted` drafts were good."""
        if trials:
            self._accepted = (self._accepted or 0) + accepted

    def end_step(self) -> None:
        """Takes the time of the step that has begun; not called for one that failed."""
        batch, drafted = self._batch, self._accepted is not None
        self._ratios.add(batch, self._clock() - self._started, drafted=drafted)
        first = FIRST_PROBE if self._ratios.knows(batch) else UNTIMED_STEPS
        left = self._until_probe.get(batch, first) - 1
        self._until_probe[batch] = NEXT_PROBE if left <= -PROBE_STEPS else left
        if self._accepted is not None:
            self._drafted[batch] += 1
            self._tokens += 1 + self._accepted / batch
        elif self._is_off(batch):
            self._rested += 1
            if self._rested >= self._pause:
                self._off_from, self._is_trial = None, True
        if self._drafted and not self._is_off(batch):
            self._weigh(batch)

    def _weigh(self, batch: int) -> None:
        """Stops drafts that lost too much, or whose next step could; starts anew if they paid."""
        lost = sum(count * self._ratios.at(one) for one, count in self._drafted.items())
        lost -= self._tokens
        if lost <= 0:
            self._saved -= lost
            self._forget()
            if self._is_trial:
                self._is_trial, self._pause = False, FIRST_PAUSE
        # Bad luck comes to all in time: what drafts have saved they may lose again.
        elif lost + self._ratios.at(batch) - 1 > min(self._credit + self._saved, MOST_CREDIT):
            # Drafts of nearly no use pay nowhere; others may where fewer sequences decode.
            is_useless = self._tokens / self._drafted.total() < LEAST_RATIO
            self._stop(1 if is_useless else batch)

    def _stop(self, off_from: int) -> None:
        """Decodes plainly from a batch on; smaller ones get a credit of their own."""
        if self._is_trial:
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
        self._off_from, self._rested, self._is_trial = off_from, 0, False
        self._saved, self._credit = 0.0, TRIAL_CREDIT
        self._forget()

    def _forget(self) -> None:
        self._drafted.clear()
        self._tokens = 0.0

    def _is_off(self, batch: int) -> bool:
        return self._off_from is not None and batch >= self._off_from


def open_pacer(
    options: GeneratorOptions, limits: ExecutorLimits, clock: Callable[[], float]
) -> FixedPacer | Pacer:
    """The pacer that `options` ask for.

    Raises:
        DflashError: a schedule that does not fit the drafter (usage).
    """
    if options.schedule is not None:
        return Pacer(options.schedule, limits)
    return LivePacer(options, limits, clock) if options.live else FixedPacer(options, limits)

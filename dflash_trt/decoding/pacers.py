"""Pacers say how many rows the next step has: fixed, by a schedule, or while drafts pay.

Outputs never depend on them, statistics do. How live acceptance is counted, and what `LivePacer`
reads of a clock: docs/design/pacing.md.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from statistics import median

from dflash_trt.backends.base import ExecutorLimits
from dflash_trt.decoding.generator_options import GeneratorOptions
from dflash_trt.decoding.schedule import NO_SPECULATION, BlockSchedule, StepPrediction
from dflash_trt.decoding.state import RequestState
from dflash_trt.errors import DflashError

WINDOW_STEPS = 16
FADING = 0.95
MARGIN = 0.03
# Acceptance is believed to be as measured until about so many drafts say otherwise.
PRIOR_DRAFTS = 32.0
CREDIT, TRIAL_CREDIT, MOST_CREDIT = 10.0, 4.0, 24.0
"""Plain steps that drafts may lose: at first, after they were stopped, with all that they saved."""
LEAST_RATIO = 1.2
"""A drafted step never counts as cheaper, in plain steps."""
FIRST_PAUSE, LONGEST_PAUSE = 256, 4096
"""Plain steps before drafts are tried again; doubled each time that they fail."""
UNTIMED_STEPS, NEXT_PROBE, PROBE_STEPS = 4, 1024, 4
"""Drafted steps of a batch before plain ones are timed beside them, and how many these are."""
_KEPT, _FEWEST = 9, 3
# Steps that are further apart may have run on a machine that did something else meanwhile.
_NEAR_STEPS = 32
_TICK = 1e-9


class FixedPacer:
    """Every step has the rows that its requests ask for."""

    def __init__(self, options: GeneratorOptions, limits: ExecutorLimits) -> None:
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


class StepRatios:
    """Time of a drafted step by batch, in steps without drafts.

    A step is compared with the latest of the other kind at the same batch; medians count. The
    first step of a batch and kind is left out: it may allocate, compile or capture.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._recent: dict[tuple[int, bool], deque[tuple[int, float]]] = {}
        self._found: dict[int, deque[float]] = {}

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
        if near:
            found = self._found.setdefault(batch, deque(maxlen=_KEPT))
            found.append(seconds / median(near) if drafted else median(near) / seconds)

    def at(self, batch: int) -> float:
        """The ratio at `batch`, or at the nearest that was timed; at least LEAST_RATIO.

        It grows with the batch: rows are free while weights are what takes time to read.
        """
        timed = [one for one, found in self._found.items() if len(found) >= _FEWEST]
        smaller = [one for one in timed if one <= batch]
        if not timed:
            return LEAST_RATIO
        return max(median(self._found[max(smaller) if smaller else min(timed)]), LEAST_RATIO)


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
        self._ratios = StepRatios()
        # Drafted steps by batch, and their tokens, since they last paid.
        self._drafted: Counter[int] = Counter()
        self._tokens = 0.0
        self._credit = CREDIT
        # Drafts are off from this batch on, and have been for so many steps; None: nowhere.
        self._off_from: int | None = None
        self._rested, self._pause = 0, FIRST_PAUSE
        self._until_probe: dict[int, int] = {}
        self._batch, self._started = 0, 0.0
        self._accepted: int | None = None

    def begin_step(self, states: Sequence[RequestState]) -> int:
        """The most rows of the step that `states`, all that decode, are about to make."""
        batch = self._batch = len(states)
        self._accepted = None
        self._started = self._clock()
        is_probe = self._until_probe.get(batch, UNTIMED_STEPS) <= 0
        return NO_SPECULATION if is_probe or self._is_off(batch) else self._most

    def count(self, rows: int, trials: int, accepted: int) -> None:
        """Takes one request's part of the step, in which `accepted` drafts were good."""
        if trials:
            self._accepted = (self._accepted or 0) + accepted

    def end_step(self) -> None:
        """Takes the time of the step that has begun; not called for one that failed."""
        batch, accepted = self._batch, self._accepted
        self._ratios.add(batch, self._clock() - self._started, drafted=accepted is not None)
        left = self._until_probe.get(batch, UNTIMED_STEPS) - 1
        self._until_probe[batch] = NEXT_PROBE if left <= -PROBE_STEPS else left
        if accepted is not None:
            self._weigh(batch, 1 + accepted / batch)
        elif self._is_off(batch):
            self._rested += 1
            if self._rested >= self._pause:
                self._off_from, self._pause = None, min(2 * self._pause, LONGEST_PAUSE)

    def _weigh(self, batch: int, tokens: float) -> None:
        """Stops drafts whose next step could lose more than they may; starts anew if they paid."""
        self._drafted[batch] += 1
        self._tokens += tokens
        lost = sum(count * self._ratios.at(one) for one, count in self._drafted.items())
        lost -= self._tokens
        if lost <= 0:
            # Bad luck comes to all in time: what drafts have saved they may lose again.
            self._credit = min(max(self._credit, CREDIT) - lost, MOST_CREDIT)
            self._pause = FIRST_PAUSE
        elif lost + self._ratios.at(batch) - 1 > self._credit:
            # Drafts of nearly no use pay nowhere; others may where fewer sequences decode.
            is_useless = self._tokens / self._drafted.total() < LEAST_RATIO
            self._off_from = 1 if is_useless else batch
            self._credit, self._rested = TRIAL_CREDIT, 0
        else:
            return
        self._drafted.clear()
        self._tokens = 0.0

    def _is_off(self, batch: int) -> bool:
        return self._off_from is not None and batch >= self._off_from


class Pacer:
    """Follows one generator's steps. Deterministic: it counts tokens and never looks at a clock.

    Raises:
        DflashError: the schedule has larger blocks than the drafter (usage).
    """

    def __init__(self, schedule: BlockSchedule, limits: ExecutorLimits) -> None:
        if schedule.largest_block > limits.block_size:
            what = f"block {schedule.largest_block} exceeds the drafter's {limits.block_size}"
            raise DflashError(what, where="block schedule", usage=True)
        self._schedule = schedule
        self._prediction: StepPrediction | None = None
        if (measured := schedule.measured) is not None:
            self._prediction = StepPrediction(measured, schedule.plain_graph, limits.block_size)
        self._chosen: dict[int, int] = {}
        self._previous: dict[int, int] = {}
        self._steps = 0
        self._seen: Counter[tuple[int, int, int]] = Counter()
        self._accepted = [0.0] * (limits.block_size - 1)
        self._expected = [0.0] * (limits.block_size - 1)
        self._factors: list[float] = []

    def block_size(self, batch: int) -> int:
        """Rows of a step of `batch` sequences at current acceptance; 1 is no speculation."""
        block = self._chosen.get(batch)
        if block is None:
            block = self._previous.get(batch, self._schedule.block_size(batch))
            if self._prediction is not None and self._factors:
                block = self._prediction.choose(batch, block, MARGIN, self._factors)
            self._chosen[batch] = block
        return block

    def begin_step(self, states: Sequence[RequestState]) -> int:
        """The most rows of the step that `states`, all that decode, are about to make."""
        self._steps += 1
        if self._steps % WINDOW_STEPS == 0:
            self._look_back()
        return self.block_size(len(states))

    def count(self, rows: int, trials: int, accepted: int) -> None:
        """Takes one request's step: `trials` drafts were reached, `accepted` of them good.

        None at all, where nothing was found, is as bad as a first one that was wrong.
        """
        self._seen[rows, max(trials, 1), accepted] += 1

    def end_step(self) -> None:
        """Nothing: it looks back when a step begins."""

    def _look_back(self) -> None:
        if self._prediction is None:
            return
        accepted = [FADING * count for count in self._accepted]
        expected = [FADING * count for count in self._expected]
        for (rows, trials, taken), count in self._seen.items():
            rates = self._prediction.rates(rows)
            if rates is None:  # a request's own block, or one cut short by the context's end
                continue
            for position in range(trials):
                expected[position] += count * rates[position]
            for position in range(taken):
                accepted[position] += count
        self._accepted, self._expected = accepted, expected
        self._seen.clear()
        # Where little was seen, a position does as the one before it.
        factor, self._factors = 1.0, []
        for good, wanted in zip(accepted, expected, strict=True):
            factor = (good + PRIOR_DRAFTS * factor) / (wanted + PRIOR_DRAFTS)
            self._factors.append(factor)
        self._previous, self._chosen = self._previous | self._chosen, {}


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

"""Which block the next step has: the schedule by batch, corrected by live acceptance.

Outputs never depend on it: every block, and none, gives the same tokens. How live acceptance is
counted, and when gaps in a drafter's context are filled: docs/design/pacing.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from dflash_trt.backends.base import ExecutorLimits, TargetCall, TargetGraph
from dflash_trt.decoding.drafter_kinds import target_graph
from dflash_trt.decoding.prediction import StepPrediction
from dflash_trt.decoding.schedule import NO_SPECULATION, BlockSchedule
from dflash_trt.decoding.scores import sampling_input
from dflash_trt.decoding.state import RequestState
from dflash_trt.errors import DflashError

GAPS = (
    "target_only leaves gaps in the drafter's context, which cannot be filled where layers are "
    "recurrent, or keep in pages only what their windows see: rows would run again"
)
WINDOW_STEPS = 16
FADING = 0.95
MARGIN = 0.03
# Acceptance is believed to be as measured until about so many drafts say otherwise.
PRIOR_DRAFTS = 32.0


class Pacer:
    """Follows one generator's steps. Deterministic: it counts tokens and never looks at a clock.

    Raises:
        DflashError: the schedule has larger blocks than the drafter, or leaves gaps that cannot be
            filled (usage).
    """

    def __init__(self, schedule: BlockSchedule, limits: ExecutorLimits) -> None:
        if schedule.largest_block > limits.block_size:
            raise DflashError(
                f"block {schedule.largest_block} exceeds the drafter's {limits.block_size}",
                where="block schedule",
                usage=True,
            )
        self._fed = target_graph(schedule.drafter)
        if limits.must_feed and schedule.fallback != self._fed:
            raise DflashError(GAPS, where="block schedule", fix="run tune again", usage=True)
        self.fallback: TargetGraph = schedule.fallback
        self._schedule = schedule
        self._prediction: StepPrediction | None = None
        self._prefill_seconds = 0.0
        if (measured := schedule.measured) is not None:
            self._prediction = StepPrediction(measured, schedule.fallback, limits.block_size)
            self._prefill_seconds = measured.prefill_seconds
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
        block = self.block_size(len(states))
        gaps = [state for state in states if state.injected_until is not None]
        if gaps:
            saving = self._saving(len(states), block)
            for state in gaps:
                # One more token without drafts is also one more row to fill in.
                state.forgone_s += saving + self._prefill_seconds
                if not saving:
                    state.forgone_s = 0.0
        return block

    def count(self, rows: int, trials: int, accepted: int) -> None:
        """Takes one request's step: `trials` drafts were reached, `accepted` of them good.

        None at all, where nothing was found, is as bad as a first one that was wrong.
        """
        self._seen[rows, max(trials, 1), accepted] += 1

    def end_step(self) -> None:
        """Nothing: it looks back when a step begins."""

    def prefill_graph(self, state: RequestState, batch: int) -> TargetGraph:
        """The graph for `state`'s next prompt chunk when `batch` sequences will decode."""
        drafts = state.rows > 1 and self.block_size(batch) != NO_SPECULATION
        return self._fed if drafts and state.injected_until is None else self.fallback

    def fill_gap(
        self,
        forward: Callable[[TargetCall], object],
        limits: ExecutorLimits,
        states: Sequence[RequestState],
        chunk_tokens: int,
    ) -> None:
        """Fills one chunk of the gap in one request's drafter context, if that pays.

        The target's own cache is written the same rows that it already holds.
        """
        slot = self._find_gap(states)
        if slot is None:
            return
        state = states[slot]
        assert state.injected_until is not None
        start = state.injected_until
        end = min(start + chunk_tokens, state.cached_length)
        is_last = end == state.cached_length
        call = TargetCall(
            "target",
            slot,
            np.array([state.ids(start, end)], dtype=np.int64),
            np.array([start], dtype=np.int64),
            np.zeros((1, 1), dtype=np.int64),
            sampling=sampling_input(limits, [state.request.sampling]),
            is_chunk=True,
            is_last=is_last,
        )
        forward(call)
        state.injected_until = None if is_last else end

    def _find_gap(self, states: Sequence[RequestState]) -> int | None:
        """The slot of the smallest gap whose filling pays."""
        gaps = [
            slot
            for slot, state in enumerate(states)
            if state.injected_until is not None and state.rows > 1
        ]
        if not gaps:
            return None
        saving = self._saving(len(states), self.block_size(len(states)))
        paying: list[tuple[int, int]] = []
        for slot in gaps:
            state = states[slot]
            assert state.injected_until is not None
            missing = state.cached_length - state.injected_until
            price = missing * self._prefill_seconds
            left = state.max_tokens - len(state.token_ids)
            if saving > 0 and state.forgone_s >= price and left * saving >= price:
                paying.append((missing, slot))
        return min(paying)[1] if paying else None

    def _saving(self, batch: int, block: int) -> float:
        """Seconds that drafting saves per token; 0 where it is off or saves none."""
        if self._prediction is None or block == NO_SPECULATION:
            return 0.0
        plain = self._prediction.tokens_per_second(batch, NO_SPECULATION)
        drafted = self._prediction.tokens_per_second(batch, block, self._factors)
        return max(0.0, 1 / plain - 1 / drafted)

    def _look_back(self) -> None:
        """Fades old counts, adds the window's, and lets blocks be chosen anew."""
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

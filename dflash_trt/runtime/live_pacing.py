"""Whether to draft, where no schedule says it: what drafts bring against what they cost, live.

Outputs never depend on it, statistics do. This is the only part of the runtime that decides by a
clock. How it decides, and what it loses at most: docs/design/pacing.md.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

from dflash_trt.backends.base import ExecutorLimits
from dflash_trt.runtime.fixed_pacing import FixedPacer
from dflash_trt.runtime.options import GeneratorOptions
from dflash_trt.runtime.state import RequestState
from dflash_trt.speculation.schedule import NO_SPECULATION

# Losses are counted in plain steps; no step is made that could lose more than is allowed.
CREDIT = 10.0
TRIAL_CREDIT = 4.0
# …while nobody has timed a drafted step, which may cost more than is assumed.
UNTIMED_CREDIT = 3.0
# One step that costs more would be a tenth of the first 200 tokens.
MOST_RATIO = 13.0
# Drafts that have saved much may lose more, up to a limit, before they are doubted.
CREDIT_EARNED, MOST_CREDIT = 1.0, 24.0
# A drafted step is taken to cost so many plain ones until it was timed, and never costs fewer.
ASSUMED_RATIO = 2.5
LEAST_RATIO = 1.2
# Drafts that just pay would bring so little as seldom as this: below, they are taken to be useless.
DOUBT = 0.01
CHECK_STEPS = 4
FIRST_PAUSE, LONGEST_PAUSE = 256, 4096
# Drafted steps at a batch before its first check without cause, and between those that follow.
FIRST_CHECK, NEXT_CHECK = 128, 1024
KEPT_TIMES = 9
FEWEST_TIMES = 1
FEWEST_RATIOS = 3
# Steps that are further apart may have run on a machine that did something else meanwhile.
NEAR_STEPS = 32
_TICK = 1e-9


class StepRatios:
    """How many plain steps the time of a drafted one would hold, by batch.

    A step is compared with the latest of the other kind at the same batch. The first step of a
    batch and kind is left out: it may allocate, compile or capture. `known` is what it begins with.
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
            self._recent[batch, drafted] = deque(maxlen=KEPT_TIMES)
            return
        seconds = max(seconds, _TICK)
        recent.append((self._steps, seconds))
        others = self._recent.get((batch, not drafted), ())
        near = [other for step, other in others if self._steps - step <= NEAR_STEPS]
        if len(near) < FEWEST_TIMES:
            return
        found = self._found.setdefault(batch, deque(maxlen=KEPT_TIMES))
        found.append(seconds / median(near) if drafted else median(near) / seconds)
        if len(found) >= FEWEST_RATIOS:
            self._known[batch] = median(found)

    def knows(self, batch: int) -> bool:
        """Whether steps of this batch, or of one like it, were timed."""
        return any(known <= batch < 2 * known for known in self._known)

    def at(self, batch: int) -> float:
        """The ratio at `batch`; where it was not found, that of a batch like it, else assumed.

        It grows with the batch: rows are free while weights are what takes time to read.
        """
        nearest = max((known for known in self._known if known <= batch), default=None)
        if nearest is not None:
            least = LEAST_RATIO if batch < 2 * nearest else ASSUMED_RATIO
            return max(self._known[nearest], least)
        return max(self._known[min(self._known)], LEAST_RATIO) if self._known else ASSUMED_RATIO


@dataclass(slots=True)
class _Account:
    """What drafted steps cost and brought since they last were worth it.

    `steps` by batch; `tokens` of a sequence, summed over the steps. `is_short`: less may be lost.
    """

    is_short: bool = False
    steps: Counter[int] = field(default_factory=Counter)
    tokens: float = 0.0

    def lost(self, ratios: StepRatios) -> float:
        """Plain steps lost, by what is known of ratios now."""
        return self._cost(ratios) - self.tokens

    def chance(self, ratios: StepRatios) -> float:
        """How likely drafts that just pay bring as little, if each is accepted as likely as all.

        A step accepts j with chance p (1 - p)^j then, where 1 / p is what it costs; all steps
        follow the negative binomial distribution.
        """
        steps = self.steps.total()
        paying = steps / self._cost(ratios)
        term = paying**steps
        if not term:  # it is too small for a float, and so are all before the mean
            return 1.0
        found = 0.0
        for accepted in range(int(self.tokens - steps) + 1):
            found += term
            term *= (1 - paying) * (steps + accepted) / (accepted + 1)
        return found

    def _cost(self, ratios: StepRatios) -> float:
        """In plain steps."""
        return sum(count * ratios.at(batch) for batch, count in self.steps.items())

    @property
    def length(self) -> float:
        """Tokens of a step, the mean; needs one."""
        return self.tokens / self.steps.total()


class LivePacer(FixedPacer):
    """Drafts the trained block, or nothing while drafts cost more than they bring.

    Plain steps inject into the drafter's context, so that it has no gaps.

    Args:
        clock: seconds, monotonic; read twice a step.
    """

    def __init__(
        self,
        options: GeneratorOptions,
        limits: ExecutorLimits,
        clock: Callable[[], float],
    ) -> None:
        super().__init__(options, limits)
        self._clock = clock
        self._ratios = StepRatios(options.step_ratios)
        self._account = _Account()
        self._saved = 0.0
        self._is_trial = False
        # Drafts are off from this batch on, and have been for so many steps; None: nowhere.
        self._off_from: int | None = None
        self._off_steps = 0
        self._pause = FIRST_PAUSE
        self._suspect = self._account
        self._until_check: dict[int, int] = {}
        self._batch, self._started = 0, 0.0
        self._accepted: int | None = None

    def begin_step(self, states: Sequence[RequestState]) -> int:
        """The most rows of the step that `states`, all that decode, are about to make."""
        self._batch, self._accepted = len(states), None
        if not self._is_trial and not self._is_off(self._batch) and self._is_hopeless(self._batch):
            self._stop(self._batch)
        self._started = self._clock()
        return NO_SPECULATION if self._is_off(self._batch) else self._most

    def count(self, rows: int, trials: int, accepted: int) -> None:
        """Takes one request's part of the step, in which `accepted` drafts were good."""
        if trials:
            self._accepted = (self._accepted or 0) + accepted

    def end_step(self) -> None:
        """Takes the time of the step that has begun; not called for one that failed."""
        drafted = self._accepted is not None
        self._ratios.add(self._batch, self._clock() - self._started, drafted=drafted)
        if self._accepted is not None:
            self._weigh(self._batch, 1 + self._accepted / self._batch)
        elif self._is_off(self._batch):
            self._rest()

    def _is_beyond(self, account: _Account, batch: int) -> bool:
        """Whether they are useless, or one more step without a good draft loses too much."""
        credit = min(CREDIT + CREDIT_EARNED * self._saved, MOST_CREDIT)
        if account.is_short:
            credit += TRIAL_CREDIT - CREDIT
        elif not self._ratios.knows(batch):
            credit += UNTIMED_CREDIT - CREDIT
        if account.lost(self._ratios) + self._ratios.at(batch) - 1 > credit:
            return True
        # What drafts have saved speaks for them: bad luck comes to all in time.
        if self._saved or not account.steps:
            return False
        return account.chance(self._ratios) < DOUBT

    def _is_hopeless(self, batch: int) -> bool:
        """Whether a step costs more than a full block could bring, or than may be lost at once."""
        return self._ratios.at(batch) > min(self._most, MOST_RATIO)

    def _is_off(self, batch: int) -> bool:
        return self._off_from is not None and batch >= self._off_from

    def _weigh(self, batch: int, tokens: float) -> None:
        """Adds a drafted step; stops drafts that have lost too much, or are due for a check."""
        account = self._account
        account.steps[batch] += 1
        account.tokens += tokens
        self._until_check[batch] = self._until_check.get(batch, FIRST_CHECK) - 1
        lost = account.lost(self._ratios)
        if lost > 0 and self._is_beyond(account, batch):
            # Drafts as poor as these pay nowhere; others may where fewer sequences decode.
            self._stop(1 if account.length < LEAST_RATIO else batch)
        elif lost <= 0:
            self._saved -= lost
            self._account = _Account()
            if self._is_trial:
                self._is_trial, self._pause = False, FIRST_PAUSE
        if self._until_check[batch] <= 0:
            self._until_check[batch] = NEXT_CHECK
            if not self._is_off(batch):
                self._stop(batch)

    def _stop(self, off_from: int) -> None:
        """Decodes plainly from a batch on; smaller ones get a credit of their own."""
        self._off_from, self._off_steps = off_from, 0
        self._suspect, self._account = self._account, _Account(is_short=True)

    def _rest(self) -> None:
        """After a plain step: drafts go on if fresh times acquit them, or are tried in time."""
        self._off_steps += 1
        if self._off_steps == CHECK_STEPS:
            batch = self._batch
            if not (self._is_hopeless(batch) or self._is_beyond(self._suspect, batch)):
                self._off_from, self._account = None, self._suspect
                return
            self._saved = 0.0
            if self._is_trial:
                self._pause = min(2 * self._pause, LONGEST_PAUSE)
        elif self._off_steps >= self._pause:
            self._off_from, self._is_trial = None, True
            self._account = _Account(is_short=True)

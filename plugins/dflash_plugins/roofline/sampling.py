"""The launches of `row_sample` as work: how often a program opens groups depends on its logits.

So its searches are repeated here in NumPy, over rows of the benchmark's logits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np

from dflash_plugins.operation import DType
from dflash_plugins.roofline.model import LaunchWork
from dflash_plugins.roofline.rates import GpuRates, read_constants
from dflash_plugins.row_sample.benchmark import SamplePoint, make_logits
from dflash_plugins.row_sample.launch import (
    FURTHEST_HALVINGS,
    FURTHEST_SPAN,
    KEY_BITS,
    opened_groups,
)
from dflash_plugins.testing.numeric import Array
from dflash_trt.sampling.noise import GROUP, GroupNoise, draw_gumbel
from dflash_trt.sampling.params import SamplingParams

SAMPLED_ROWS = 8
"""Rows whose steps are counted; the longest stands for all, as programs of a wave do."""
MARGIN = 0.01
"""Of estimated scores, as in the kernel."""


@dataclass(frozen=True, slots=True)
class RowSteps:
    """What a program of `row_sample` does one after the other.

    Args:
        bisections: over what is known of groups, without a load.
        searches: openings of groups, to compare their logits or to weigh them.
        draws: openings of groups whose tokens get noise.
    """

    bisections: int
    searches: int
    draws: int

    @property
    def loads(self) -> int:
        return self.searches + self.draws


def group_work(point: SamplePoint, resident: int, rates: GpuRates) -> LaunchWork:
    """The launch that reads all rows."""
    case, logits = point.cases[0], point.logits
    grid = case.launch().grid
    programs = grid[0] * grid[1]
    return LaunchWork(
        name=case.operation.name,
        groups=((programs, 1),),
        tile_bytes=logits.nbytes / programs,
        buffers=1,
        tile_seconds=_instructions(logits.nbytes / logits.dtype.numpy.itemsize / programs, rates),
        resident=resident,
        cached_loads=0,
        is_cached=logits.nbytes <= rates.l2_bytes,
        written_bytes=sum(one.nbytes for one in case.outputs.values()),
    )


def choice_work(point: SamplePoint, resident: int, rates: GpuRates) -> LaunchWork:
    """The launch that opens groups and chooses: a program for each row.

    What it opens again is in the L2 cache. If not all logits are, the first opening waits longer.
    """
    case, logits = point.cases[1], point.logits
    steps, opened = row_steps(point), opened_groups(logits.dtype)
    tokens = opened * GROUP
    groups = case.inputs["peaks"].shape[-1]
    search = _instructions(tokens, rates) + rates.tile_latency
    draw = _instructions(tokens, rates, "noise_instructions") + rates.tile_latency
    own = steps.bisections * rates.tile_latency + steps.searches * search + steps.draws * draw
    own += _instructions(groups * bool(steps.draws), rates, "word_instructions")
    (programs, *_) = case.launch().grid
    is_far = logits.nbytes > rates.l2_bytes
    return LaunchWork(
        name=case.operation.name,
        groups=((programs, steps.loads),),
        tile_bytes=tokens * logits.dtype.numpy.itemsize,
        buffers=1,
        tile_seconds=own / steps.loads,
        resident=resident,
        cached_loads=1 + is_far * round(rates.memory_latency / rates.l2_latency),
        is_cached=True,
        written_bytes=programs * DType.INT64.numpy.itemsize,
    )


def _instructions(tokens: float, rates: GpuRates, name: str = "row_instructions") -> float:
    """Seconds of an SM for what so many logits take."""
    return tokens * read_constants()[name].value / rates.lanes


def row_steps(point: SamplePoint) -> RowSteps:
    """The steps of the longest of a few rows of the benchmark's logits."""
    return _longest(point.logits.dtype, point.logits.shape[-1], point.sampling)


@cache
def _longest(dtype: DType, vocabulary: int, sampling: SamplingParams) -> RowSteps:
    rows = make_logits(SAMPLED_ROWS, vocabulary, dtype).astype(np.float32)
    found = [count_steps(row, dtype, sampling, at) for at, row in enumerate(rows)]
    return max(found, key=lambda one: one.loads)


def count_steps(logits: Array, dtype: DType, sampling: SamplingParams, position: int) -> RowSteps:
    """The steps that the kernel takes for one row of logits [V] of a type, in float32."""
    if sampling.greedy:
        return RowSteps(0, 1, 0)
    return _Search(logits, dtype, sampling).steps(position)


class _Search:
    """A row of logits, searched as search.py and draw.py of the kernel do."""

    def __init__(self, logits: Array, dtype: DType, sampling: SamplingParams) -> None:
        self._logits, self._sampling = logits, sampling
        self._bits, self._opened = KEY_BITS[dtype], opened_groups(dtype)
        self._peaks = np.maximum.reduceat(logits, np.arange(0, len(logits), GROUP))
        self._keys, self._peak_keys = self._key(logits), self._key(self._peaks)
        self._highest = float(self._peaks.max())
        self._bisections = self._searches = self._draws = 0

    def steps(self, position: int) -> RowSteps:
        top_k, top_p = self._sampling.top_k, self._sampling.top_p
        kept, scaled = np.ones(len(self._logits), bool), self._scale(self._logits)
        if top_k is not None and top_k < len(self._logits):
            border = self._find_top_k(top_k)
            kept = self._keys >= border
            if top_p < 1:
                self._searches += self._openings(border)
        weights = np.exp(scaled)
        wanted = top_p * float(weights[kept].sum())
        tokens = np.arange(len(self._logits))
        scores = scaled + draw_gumbel(self._sampling.seed, position, tokens)
        noise = GroupNoise.draw(self._sampling.seed, position, 0, len(self._logits) - 1)
        reach = self._scale(self._peaks) - np.log(noise.least()[: len(self._peaks)])
        before = wanted
        while before >= wanted:
            winner = self._draw(np.where(kept, scores, -np.inf), reach)
            before = 0.0
            if top_p < 1:
                key = self._keys[winner]
                kept = (self._keys > key) | ((self._keys == key) & (tokens < winner))
                reach = np.where(self._peak_keys >= key, reach, -np.inf)
                self._searches += self._openings(key)
                before = float(weights[kept].sum())
        return RowSteps(self._bisections, self._searches, self._draws)

    def _find_top_k(self, top_k: int) -> int:
        """The key of the k-th highest token."""
        least, turns = _bisect(
            0, self._top + 1, lambda key: np.count_nonzero(self._peak_keys >= key) >= top_k
        )
        self._bisections += turns
        border, turns = _bisect(
            least, self._top + 1, lambda key: np.count_nonzero(self._keys >= key) >= top_k
        )
        self._searches += (turns + 1) * self._openings(least)  # one finds where equal logits end
        return border

    def _draw(self, scores: Array, reach: Array) -> int:
        """The winner: groups that may get furthest are opened, then all that may win."""
        highest = reach.max()
        high, low = highest, highest - FURTHEST_SPAN
        for _ in range(FURTHEST_HALVINGS):
            middle = (low + high) / 2
            is_many = np.count_nonzero(reach >= middle) > self._opened
            low, high = (middle, high) if is_many else (low, middle)
        best = np.maximum.reduceat(scores, np.arange(0, len(scores), GROUP))
        estimate = best[reach >= high].max()
        self._bisections += FURTHEST_HALVINGS
        # The winner's group is opened once more, for its exact score.
        self._draws += 2 + self._turns(np.count_nonzero(reach >= estimate - MARGIN))
        return int(scores.argmax())

    @property
    def _top(self) -> int:
        return int(self._peak_keys.max())

    def _turns(self, groups: int) -> int:
        return -(-groups // self._opened)

    def _openings(self, least: int) -> int:
        return self._turns(np.count_nonzero(self._peak_keys >= least))

    def _scale(self, values: Array) -> Array:
        scaled: Array = (values.astype(np.float64) - self._highest) / self._sampling.temperature
        return scaled

    def _key(self, values: Array) -> Array:
        bits = (values + np.float32(0)).view(np.int32)
        ordered = np.where(bits < 0, ~bits, bits ^ np.int32(-(2**31))).view(np.uint32)
        return ordered.astype(np.int64) >> (32 - self._bits)


def _bisect(low: int, high: int, reaches: Callable[[int], bool]) -> tuple[int, int]:
    """The highest key from `low` on, below `high`, that reaches; how many were tried."""
    turns = 0
    while high - low > 1:
        middle, turns = (low + high) // 2, turns + 1
        low, high = (middle, high) if reaches(middle) else (low, middle)
    return low, turns

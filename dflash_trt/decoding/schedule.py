"""`block_schedule.json`: how many rows a verify step has, by the sequences that decode.

An entry holds up to `max_batch` sequences, the last one above that too; block 1 is no speculation.
With `measured`, what `tune` measured, the runtime follows live acceptance; without it the schedule
never adapts. docs/tuning.md shows the file.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from dflash_trt.backends.base import TargetGraph
from dflash_trt.core.limits import MAX_BLOCK, Count
from dflash_trt.core.validation import StrictRecord, read_record
from dflash_trt.decoding.drafter_kinds import DFLASH, DrafterKind, target_graph

SCHEDULE_NAME = "block_schedule.json"
SCHEMA_VERSION: Literal[1] = 1
NO_SPECULATION = 1

MeasuredSeconds = Annotated[float, Field(gt=0, lt=1e6)]
Probability = Annotated[float, Field(ge=0, le=1)]
Block = Annotated[int, Field(ge=1, le=MAX_BLOCK)]


class BlockRange(StrictRecord):
    """The block of up to `max_batch` sequences."""

    max_batch: Count
    block_size: Block


class StepSeconds(StrictRecord):
    """Seconds of one decode step of `batch` sequences.

    `target_only` is the autoregressive baseline, `target` the injecting target with one row, and
    `blocks` a draft and a verify pass of each block size measured. Without a draft graph `target`
    is the baseline again, and `blocks` expect steps for which nothing was found, which are plain.
    """

    batch: Count
    target_only: MeasuredSeconds
    target: MeasuredSeconds
    blocks: list[MeasuredSeconds]


class AnswerGroup(StrictRecord):
    """Some of the answers that were measured: those of one named set, or those that loop.

    `acceptance_lengths` are theirs, by block; None where nothing was drafted for them.
    """

    name: str
    answers: Count
    acceptance_lengths: list[Annotated[float, Field(ge=1, le=MAX_BLOCK)] | None]


class Measurements(StrictRecord):
    """What a schedule was derived from.

    Args:
        prompts: how many were run for the acceptance, at most `max_tokens` output tokens each.
        threads: CPU threads of a step.
        positions: mean cache positions held when steps were timed.
        block_sizes: the blocks measured, ascending.
        steps: step times, by batch, ascending.
        prefill_seconds: seconds per prompt token, one sequence.
        prefill_only_seconds: of older files; means nothing.
        acceptance: by block: P(draft j accepted | all before it accepted), j = 1 … block - 1. A
            step for which nothing was found counts as one whose first draft was not accepted.
        acceptance_lengths: by block: tau, emitted tokens / steps.
        sets: the same by named set of prompts, where there are several.
        looping: the answers that repeat themselves (`runtime.loops`), which count like others.
    """

    prompts: Count
    max_tokens: Count
    threads: Count
    positions: Count
    block_sizes: Annotated[list[Annotated[int, Field(ge=2, le=MAX_BLOCK)]], Field(min_length=1)]
    steps: Annotated[list[StepSeconds], Field(min_length=1)]
    prefill_seconds: MeasuredSeconds
    prefill_only_seconds: MeasuredSeconds | None = Field(default=None, exclude=True)
    acceptance: list[list[Probability]]
    acceptance_lengths: list[Annotated[float, Field(ge=1, le=MAX_BLOCK)]]
    sets: list[AnswerGroup] | None = None
    looping: AnswerGroup | None = None

    @model_validator(mode="after")
    def _fit_together(self) -> Measurements:
        sizes = self.block_sizes
        if not _ascends(sizes) or not _ascends([step.batch for step in self.steps]):
            raise ValueError("block_sizes and the batches of steps must ascend")
        if any(len(step.blocks) != len(sizes) for step in self.steps):
            raise ValueError("every step needs a time for each of block_sizes")
        if [len(rates) + 1 for rates in self.acceptance] != sizes:
            raise ValueError("acceptance needs block - 1 rates for each of block_sizes")
        if len(self.acceptance_lengths) != len(sizes):
            raise ValueError("acceptance_lengths needs one for each of block_sizes")
        groups = [*(self.sets or ()), *((self.looping,) if self.looping else ())]
        if any(len(group.acceptance_lengths) != len(sizes) for group in groups):
            raise ValueError("acceptance_lengths of a group needs one for each of block_sizes")
        return self


class BlockSchedule(StrictRecord):
    """A schedule, and what it was derived from.

    `bundle` identifies the bundle it was measured on (see `tuning.bundle_schedule.fingerprint`),
    `drafter` who filled the blocks. `fallback` is of older files, and means nothing.
    """

    schema_version: Literal[1] = SCHEMA_VERSION
    blocks: Annotated[list[BlockRange], Field(min_length=1)]
    executor: str
    fallback: TargetGraph | None = Field(default=None, exclude=True)
    bundle: str | None = None
    drafter: DrafterKind = Field(default=DFLASH, exclude_if=lambda one: one == DFLASH)
    measured: Measurements | None = None

    @model_validator(mode="after")
    def _fit_together(self) -> BlockSchedule:
        if not _ascends([entry.max_batch for entry in self.blocks]):
            raise ValueError("blocks must be in ascending order of max_batch")
        if self.measured is not None:
            known = {NO_SPECULATION, *self.measured.block_sizes}
            unknown = sorted({entry.block_size for entry in self.blocks} - known)
            if unknown:
                raise ValueError(f"block {unknown[0]} is not among those measured")
        return self

    @classmethod
    def read(cls, path: Path) -> BlockSchedule:
        """The schedule in the file `path`.

        Raises:
            DflashError: unreadable, another schema version, or fields that do not fit.
        """
        return read_record(path, cls, SCHEMA_VERSION, "run `dflash-trt tune` again", usage=True)

    @property
    def max_batch(self) -> int:
        """The largest batch it was made for."""
        return self.blocks[-1].max_batch

    @property
    def plain_graph(self) -> TargetGraph:
        """What decodes where the block is 1: it keeps a draft graph's context complete."""
        return target_graph(self.drafter)

    @property
    def largest_block(self) -> int:
        return max(entry.block_size for entry in self.blocks)

    def block_size(self, batch: int) -> int:
        """Rows of a verify step while `batch` sequences decode; 1 is no speculation."""
        fitting = (entry for entry in self.blocks if batch <= entry.max_batch)
        return next(fitting, self.blocks[-1]).block_size

    def draft_len_schedule(self) -> dict[int, int]:
        """TensorRT-LLM's `draft_len_schedule`: {largest batch: drafts}, drafts = block - 1.

        It does not speculate above the last key. The smallest key must have the most drafts, so
        larger numbers are cut to that; empty where the smallest batches have none.
        """
        most = self.blocks[0].block_size - 1
        if most == 0:
            return {}
        drafts = {entry.max_batch: min(entry.block_size - 1, most) for entry in self.blocks}
        while not drafts[max(drafts)]:
            del drafts[max(drafts)]
        return drafts

    def describe(self) -> str:
        """The schedule in words, with the graph that decodes where there are no drafts."""
        parts, first = [], 1
        for entry in self.blocks:
            block = entry.block_size
            name = "no drafts" if block == NO_SPECULATION else f"block {block}"
            last = entry.max_batch
            parts.append(f"{name} for {first if first == last else f'{first} to {last}'}")
            first = last + 1
        return f"{', '.join(parts)} sequences; without drafts {self.plain_graph} decodes"

    def to_json(self) -> dict[str, Any]:
        return self.model_dump(mode="json", exclude_none=True)


class StepPrediction:
    """Seconds, tokens and tokens/s of a step by batch and block, from `tune`'s measurements.

        tokens/s of a batch with block S = batch x E(S) / seconds(batch, S)
        E(S) = 1 + sum over j = 1 … S-1 of the product of the first j acceptance rates

    S = 1 is decoding without drafts: E(1) = 1.

    Args:
        measured: times and acceptance.
        plain: the graph of steps without drafts.
        longest: the largest block that is considered.
    """

    def __init__(self, measured: Measurements, plain: TargetGraph, longest: int) -> None:
        self._batches = [step.batch for step in measured.steps]
        self._rates = {
            block: tuple(rates)
            for block, rates in zip(measured.block_sizes, measured.acceptance, strict=True)
            if block <= longest
        }
        plain_seconds = [
            step.target_only if plain == "target_only" else step.target for step in measured.steps
        ]
        self._seconds = {NO_SPECULATION: plain_seconds}
        for index, block in enumerate(measured.block_sizes):
            if block <= longest:
                self._seconds[block] = [step.blocks[index] for step in measured.steps]

    @property
    def choices(self) -> tuple[int, ...]:
        """The measured blocks, ascending; the first is 1, no speculation."""
        return tuple(self._seconds)

    def rates(self, block: int) -> tuple[float, ...] | None:
        """The measured acceptance rates of `block`'s drafts; None for a block not measured."""
        return self._rates.get(block)

    def seconds(self, batch: int, block: int) -> float:
        """Seconds of a step: interpolated between measured batches, proportional past the last."""
        times, batches = self._seconds[block], self._batches
        if batch >= batches[-1]:
            return times[-1] * batch / batches[-1]
        above = bisect_left(batches, batch)
        if above == 0:
            return times[0]
        low, high = batches[above - 1], batches[above]
        share = (batch - low) / (high - low)
        return times[above - 1] + share * (times[above] - times[above - 1])

    def tokens(self, block: int, factors: Sequence[float] = ()) -> float:
        """E(S); `factors[j]` scales the rate of draft j + 1 (1 where there is none)."""
        expected = reach = 1.0
        for position, rate in enumerate(self._rates.get(block, ())):
            factor = factors[position] if position < len(factors) else 1.0
            reach *= min(1.0, rate * factor)
            expected += reach
        return expected

    def tokens_per_second(self, batch: int, block: int, factors: Sequence[float] = ()) -> float:
        return batch * self.tokens(block, factors) / self.seconds(batch, block)

    def choose(self, batch: int, current: int, margin: float, factors: Sequence[float] = ()) -> int:
        """The block with most tokens/s; `current` unless that is `margin` better (0.02: 2 %)."""

        def rate(block: int) -> float:
            return self.tokens_per_second(batch, block, factors)

        best = max(self.choices, key=rate)
        return current if rate(best) <= rate(current) * (1 + margin) else best


def schedule_name(drafter: DrafterKind) -> str:
    """The file of a bundle that holds the schedule for `drafter`."""
    return SCHEDULE_NAME if drafter == DFLASH else f"block_schedule.{drafter}.json"


def merge_ranges(blocks: Sequence[int]) -> list[BlockRange]:
    """Ranges of equal blocks, of `blocks[n - 1]` for n = 1, 2, … sequences."""
    ends = [n for n, (one, following) in enumerate(pairwise(blocks), start=1) if one != following]
    return [BlockRange(max_batch=end, block_size=blocks[end - 1]) for end in [*ends, len(blocks)]]


def _ascends(values: Sequence[int]) -> bool:
    return all(one < following for one, following in pairwise(values))

"""Measures a pair on the executor it will run on, and derives its block schedule.

Acceptance is counted by decoding the prompts once with every block size: the rows of a block see
each other, so a smaller block is not the beginning of the trained one. How step times are made
robust against what else the machine does: docs/design/pacing.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress, cycle, islice
from statistics import fmean, median

import numpy as np

from dflash_trt.backends.base import (
    Executor,
    ExecutorLimits,
    Int64Array,
    StepCall,
    TargetCall,
    TargetGraph,
    hold_positions,
)
from dflash_trt.core.limits import PREFILL_CHUNK
from dflash_trt.core.progress import Progress
from dflash_trt.decoding.drafter_kinds import DFLASH, DrafterKind, target_graph
from dflash_trt.decoding.generator import Generator
from dflash_trt.decoding.generator_options import GeneratorOptions
from dflash_trt.decoding.loops import is_looping
from dflash_trt.decoding.request import Request, RequestResult
from dflash_trt.decoding.schedule import (
    NO_SPECULATION,
    AnswerGroup,
    BlockSchedule,
    Measurements,
    StepPrediction,
    StepSeconds,
    merge_ranges,
)
from dflash_trt.decoding.scores import needed_scores, sampling_input
from dflash_trt.decoding.statistics import TotalStatistics, total
from dflash_trt.errors import DflashError

# Fewer verify steps than this say little about acceptance.
LEAST_STEPS = 32
# A step is timed from its fourth in a row on: shapes are bound at the first, engines capture a
# graph after the second, and the processor's caches are then full of this step's weights.
WARM_UP_CALLS = 3
STEPS_SECONDS = 0.02
# A neighbouring batch keeps the block unless another is predicted to be this much faster.
MARGIN = 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningOptions:
    """What to measure.

    `block_sizes` (2 … the trained block) and `batches` (up to the executor's slots) ascend. Every
    kind of step is timed `rounds` times; `threads` of the executor are only recorded. `drafter`
    fills the blocks.
    """

    block_sizes: tuple[int, ...]
    batches: tuple[int, ...]
    rounds: int = 5
    threads: int = 1
    prefill_chunk: int = PREFILL_CHUNK
    eos_token_ids: tuple[int, ...] = ()
    drafter: DrafterKind = DFLASH


def measure(
    executor: Executor,
    requests: Sequence[Request],
    options: TuningOptions,
    progress: Progress,
    set_names: Sequence[str] = (),
) -> Measurements:
    """Runs `requests`, which all have `max_tokens`, and times steps.

    `set_names` has the set of each request; where there are several, acceptance is recorded for
    each, and what is decided is of all together.

    Raises:
        DflashError: no requests, outputs too short to say anything about acceptance (usage).
    """
    if not requests:
        raise DflashError("no prompt to measure with", usage=True)
    acceptance: list[list[float]] = []
    summaries: list[TotalStatistics] = []
    by_block: list[list[RequestResult]] = []
    for block in options.block_sizes:
        progress.stage(f"acceptance at block {block}", len(requests), "steps")
        results = _decode(executor, requests, block, options, progress.advance)
        summary = total(result.statistics for result in results)
        if summary.steps < LEAST_STEPS:
            raise DflashError(
                f"{summary.steps} verify steps say too little about acceptance, {LEAST_STEPS} are "
                "the least",
                where="prompts",
                fix="give more prompts, longer outputs (--max-tokens), or a prompt that is not "
                "answered at once",
                usage=True,
            )
        rates = [rate or 0.0 for rate in summary.conditional_acceptance] or [0.0]
        acceptance.append(rates + [0.0] * (block - 1 - len(rates)))
        summaries.append(summary)
        by_block.append(results)
    # The outputs are the same whatever the block: any run's do.
    texts = [
        (*request.prompt_ids, *result.token_ids[: len(result.token_ids) // 2])
        for request, result in zip(requests, results, strict=True)
    ]
    bench = StepBench(executor, requests[0], texts, options)
    prefill_seconds = bench.fill()
    progress.stage("step times", options.rounds * len(options.batches), "steps")
    steps = bench.time_steps(progress.advance)
    if options.drafter != DFLASH:  # where nothing was found there was no first draft
        found = [sum(one.position_trials[:1]) / one.steps for one in summaries]
        for rates, share in zip(acceptance, found, strict=True):
            rates[0] *= share
        steps = [expect_plain_steps(step, found) for step in steps]
    executor.release_slots(0)
    sets = {name: [one == name for one in set_names] for name in dict.fromkeys(set_names)}
    loops = [is_looping(one.token_ids) for one in results]
    return Measurements(
        prompts=len(requests),
        max_tokens=max(request.max_tokens or 1 for request in requests),
        threads=options.threads,
        positions=bench.positions,
        block_sizes=list(options.block_sizes),
        steps=steps,
        prefill_seconds=prefill_seconds,
        acceptance=acceptance,
        acceptance_lengths=[one.acceptance_length or 1.0 for one in summaries],
        sets=[_group(*one, by_block) for one in sets.items()] if len(sets) > 1 else None,
        looping=_group("looping", loops, by_block) if any(loops) else None,
    )


def derive_schedule(
    measured: Measurements,
    limits: ExecutorLimits,
    *,
    executor: str,
    bundle: str | None = None,
    drafter: DrafterKind = DFLASH,
) -> BlockSchedule:
    """The schedule with most predicted tokens/s for every batch from 1 to `limits.max_batch`."""
    prediction = StepPrediction(measured, target_graph(drafter), max(measured.block_sizes))
    blocks: list[int] = []
    for batch in range(1, limits.max_batch + 1):
        margin = MARGIN if blocks else 0.0
        current = blocks[-1] if blocks else NO_SPECULATION
        blocks.append(prediction.choose(batch, current, margin))
    return BlockSchedule(
        blocks=merge_ranges(blocks),
        executor=executor,
        bundle=bundle,
        drafter=drafter,
        measured=measured,
    )


def expect_plain_steps(step: StepSeconds, found: Sequence[float]) -> StepSeconds:
    """The mean times of blocks where each sequence finds drafts in so many of its steps, by block.

    A step is plain where none of its sequences found any.
    """
    plain = [(1 - share) ** step.batch for share in found]
    blocks = [
        share * step.target_only + (1 - share) * seconds
        for share, seconds in zip(plain, step.blocks, strict=True)
    ]
    return step.model_copy(update={"blocks": blocks})


def candidate_blocks(trained: int) -> list[int]:
    """Blocks worth measuring: all up to 8, then every fourth, and the trained one."""
    return sorted({*range(2, min(trained, 8) + 1), *range(12, trained, 4), trained})


def candidate_batches(max_batch: int) -> list[int]:
    """Powers of two up to `max_batch`, and it."""
    return sorted({1 << bit for bit in range(max_batch.bit_length())} | {max_batch})


def _group(
    name: str, chosen: Sequence[bool], by_block: Sequence[Sequence[RequestResult]]
) -> AnswerGroup:
    summaries = [total(one.statistics for one in compress(results, chosen)) for results in by_block]
    return AnswerGroup(
        name=name,
        answers=sum(chosen),
        acceptance_lengths=[summary.acceptance_length for summary in summaries],
    )


def _decode(
    executor: Executor,
    requests: Sequence[Request],
    block: int,
    options: TuningOptions,
    on_done: Callable[[int], None],
) -> list[RequestResult]:
    settings = GeneratorOptions(
        block_size=block, prefill_chunk=options.prefill_chunk, drafter=options.drafter
    )
    generator = Generator(executor, eos_token_ids=options.eos_token_ids, options=settings)
    fresh = [replace(request, block_size=None) for request in requests]
    return generator.generate(fresh, lambda index, event: on_done(event.result is not None))


class StepBench:
    """Slots filled with `texts`, and decode steps over them that only overwrite scratch rows.

    How they sample is `request`'s; of `options` only sizes and rounds count.
    """

    def __init__(
        self,
        executor: Executor,
        request: Request,
        texts: Sequence[Sequence[int]],
        options: TuningOptions,
    ) -> None:
        longest = executor.limits.max_seq_len - max(options.block_sizes)
        slots = max(options.batches)
        self._texts = [list(text[:longest]) for text in islice(cycle(texts), slots)]
        self._executor = executor
        self._scores = needed_scores(executor.limits, request)
        self._packed = sampling_input(executor.limits, [request.sampling] * slots)
        self._options = options
        self._chunk = executor.limits.chunk(options.prefill_chunk)
        hold_positions(executor, longest + max(options.block_sizes), slots)

    @property
    def positions(self) -> int:
        """Mean cache positions held."""
        return max(1, round(fmean(map(len, self._texts))))

    def fill(self) -> float:
        """Prefills every slot, one by one; returns the seconds per token."""
        row, graph = np.zeros((1, 1), dtype=np.int64), target_graph(self._options.drafter)
        started = time.perf_counter()
        for slot, text in enumerate(self._texts):
            for start in range(0, len(text), self._chunk):
                ids = np.array([text[start : start + self._chunk]], dtype=np.int64)
                places, sampling = np.array([start]), self._sampling(1)
                call = TargetCall(graph, slot, ids, places, row, sampling=sampling, is_chunk=True)
                self._executor.forward(call)
        return (time.perf_counter() - started) / sum(map(len, self._texts))

    def time_steps(self, on_batch: Callable[[int], None]) -> list[StepSeconds]:
        """The time of every kind of step of every batch, in rounds over all of them."""
        rounds: dict[int, list[list[float]]] = {batch: [] for batch in self._options.batches}
        for _ in range(self._options.rounds):
            for batch, taken in rounds.items():
                taken.append([_time(kind) for kind in self._kinds(batch)])
                on_batch(1)
        steps: list[StepSeconds] = []
        for batch, taken in rounds.items():
            pace = min(map(sum, taken))
            shares = zip(*([one / sum(times) for one in times] for times in taken), strict=True)
            plain, feeding, *blocks = (pace * median(share) for share in shares)
            steps.append(StepSeconds(batch=batch, target_only=plain, target=feeding, blocks=blocks))
        return steps

    def _kinds(self, batch: int) -> list[Callable[[], object]]:
        anchors = np.array([text[-1] for text in self._texts[:batch]], dtype=np.int64)
        starts = np.array([len(text) for text in self._texts[:batch]], dtype=np.int64)
        fed = target_graph(self._options.drafter)
        kinds: list[Callable[[], object]] = [
            partial(self._rows, "target_only", anchors, starts, 1),
            partial(self._rows, fed, anchors, starts, 1),
        ]
        for block in self._options.block_sizes:
            if self._options.drafter == DFLASH:
                step = StepCall(0, anchors, starts, block, self._scores, self._sampling(batch))
                kinds.append(partial(self._executor.speculate, step))
            else:  # looking drafts up takes no time
                kinds.append(partial(self._rows, fed, anchors, starts, block))
        return kinds

    def _rows(self, graph: TargetGraph, anchors: Int64Array, starts: Int64Array, rows: int) -> None:
        ids = np.repeat(anchors[:, None], rows, axis=1)
        chosen = np.tile(np.arange(rows), (len(anchors), 1))
        sampling = self._sampling(len(anchors))
        self._executor.forward(TargetCall(graph, 0, ids, starts, chosen, self._scores, sampling))

    def _sampling(self, batch: int) -> Int64Array | None:
        return None if self._packed is None else self._packed[:batch]


def _time(step: Callable[[], object]) -> float:
    for _ in range(WARM_UP_CALLS):
        step()
    count, started = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - started) < STEPS_SECONDS or not count:
        step()
        count += 1
    return elapsed / count

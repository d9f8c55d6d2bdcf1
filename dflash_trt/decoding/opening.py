"""What a drafted step costs, found when a pair is opened and before any request pays for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median

from dflash_trt.backends.base import Executor
from dflash_trt.decoding.drafter_kinds import DFLASH
from dflash_trt.decoding.generator import Generator
from dflash_trt.decoding.generator_options import GeneratorOptions
from dflash_trt.decoding.request import Request

MOST_S = 2.0
# Of one batch and kind: the first is left out, it may allocate, compile or capture.
_TIMED = 4
# A pair whose single row takes more of the time than this is not timed: it would take longer.
_LARGEST_SHARE = 1 / 24
_TICK = 1e-9


def time_opening(
    executor: Executor,
    options: GeneratorOptions,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[tuple[int, float], ...]:
    """How many steps without drafts the time of a drafted one would hold: (batch, ratio) pairs.

    Batches double from 1, as many as about MOST_S allow; none where a single row takes too long.
    Only DFlash drafts are timed: a draft that was looked up may be missing. Call it before the
    executor's generator is made: the caches' contents are lost.
    """
    if options.drafter != DFLASH:
        return ()
    found: list[tuple[int, float]] = []
    began, batch = clock(), 1
    while batch <= executor.limits.max_batch:
        batch_began = clock()
        plain = _time_steps(executor, batch, clock, drafts=False)
        drafted = _time_steps(executor, batch, clock, drafts=True) if plain else []
        if not plain or not drafted:
            break
        found.append((batch, median(drafted) / max(median(plain), _TICK)))
        now = clock()
        if now - began + 3 * (now - batch_began) > MOST_S:
            break
        batch *= 2
    return tuple(found)


def with_step_ratios(executor: Executor, options: GeneratorOptions) -> GeneratorOptions:
    """`options` with what `time_opening` finds, where drafts are left out while they do not pay."""
    if not options.live:
        return options
    return replace(options, step_ratios=time_opening(executor, options))


def _time_steps(
    executor: Executor, batch: int, clock: Callable[[], float], *, drafts: bool
) -> list[float]:
    """Seconds of steps of `batch` sequences; none where they end too early or take too long."""
    generator = Generator(executor, options=GeneratorOptions(), clock=clock)
    ids = [
        generator.submit(Request(prompt_ids=(0,), ignore_eos=True, speculate=drafts))
        for _ in range(batch)
    ]
    seconds: list[float] = []
    filled = 0
    while len(seconds) <= _TIMED:
        began = clock()
        events = generator.step()
        took = clock() - began
        if any(event.result is not None for event in events):
            break
        if filled < batch:  # a step that takes a prompt, too
            filled += 1
            if took > MOST_S * _LARGEST_SHARE and batch == 1:
                break
        else:
            seconds.append(took)
    for request_id in ids:
        generator.cancel(request_id)
    return seconds[1:] if len(seconds) > _TIMED else []

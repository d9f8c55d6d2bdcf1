"""Proof by comparison: speculation against the autoregressive baseline, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from dflash_trt.executors.base import Executor
from dflash_trt.runtime.engine import Engine
from dflash_trt.runtime.options import EngineOptions
from dflash_trt.runtime.request import Request, RequestResult
from dflash_trt.runtime.statistics import TotalStatistics, total


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """One way of running the prompts that must give what the baseline gives."""

    speculation: bool
    batch: int
    block_size: int | None

    def __str__(self) -> str:
        name = f"DFlash block {self.block_size}" if self.speculation else "target_only"
        return f"{name}, batch {self.batch}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first place where a mode departs from the baseline.

    `position` counts output tokens from 0; `vocabulary_id` is the first logit that differs,
    None where the lengths differ.
    """

    mode: str
    prompt: int
    position: int
    expected_token: int | None
    actual_token: int | None
    vocabulary_id: int | None
    expected_logit: float | None
    actual_logit: float | None

    def __str__(self) -> str:
        where = f"{self.mode}: prompt {self.prompt}, output token {self.position}"
        if self.vocabulary_id is None:
            return f"{where}: token {self.actual_token}, the baseline has {self.expected_token}"
        return (
            f"{where}: logit {self.vocabulary_id} is {self.actual_logit!r}, the baseline has "
            f"{self.expected_logit!r} (tokens {self.actual_token} and {self.expected_token})"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeReport:
    """What one mode did: tokens and logits compared, and its first difference if any."""

    mode: str
    tokens: int
    logits: int
    difference: Difference | None
    statistics: TotalStatistics


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Decode tokens/s at batch 1 of baseline and speculation, runs interleaved.

    Each item is one run over the same prompts: sum of (n - 1) / sum of (E2E - TTFT).
    """

    baseline: tuple[float, ...]
    speculative: tuple[float, ...]

    @property
    def speedup(self) -> float:
        """Median of the ratios of neighbouring runs."""
        return median(self.ratios)

    @property
    def ratios(self) -> tuple[float, ...]:
        pairs = zip(self.speculative, self.baseline, strict=True)
        return tuple(speculative / baseline for speculative, baseline in pairs)


def verify(
    executor: Executor,
    requests: Sequence[Request],
    modes: Sequence[Mode],
    *,
    eos_token_ids: Sequence[int] = (),
    prefill_chunk: int = 256,
    on_tokens: Callable[[int], None] = lambda count: None,
) -> list[ModeReport]:
    """Runs `requests` with target_only one by one, then in every mode, and compares.

    Every output token's logits row must have the baseline's bits. Works in groups, so that
    only one group's logits are held. `on_tokens` hears of every output token produced.
    """

    def run(group: Sequence[Request], mode: Mode) -> list[RequestResult]:
        options = EngineOptions(
            speculation=mode.speculation,
            block_size=mode.block_size,
            prefill_chunk=prefill_chunk,
            record_logits=True,
        )
        engine = Engine(executor, eos_token_ids=eos_token_ids, options=options)
        results: list[RequestResult] = []
        for part in _parts(group, mode.batch):
            results += engine.generate(part, lambda _, event: on_tokens(len(event.token_ids)))
        return results

    baseline_mode = Mode(speculation=False, batch=1, block_size=None)
    outcomes: dict[Mode, list[RequestResult]] = {mode: [] for mode in modes}
    differences: dict[Mode, Difference | None] = dict.fromkeys(modes)
    logits = dict.fromkeys(modes, 0)
    offset = 0
    for group in _parts(requests, max((mode.batch for mode in modes), default=1)):
        expected = run(group, baseline_mode)
        for mode in modes:
            for index, (want, got) in enumerate(zip(expected, run(group, mode), strict=True)):
                if differences[mode] is None:
                    differences[mode] = find_difference(want, got, str(mode), offset + index)
                logits[mode] += 0 if got.logits is None else got.logits.size
                outcomes[mode].append(got)
        offset += len(group)
    return [
        ModeReport(
            mode=str(mode),
            tokens=sum(len(result.token_ids) for result in outcomes[mode]),
            logits=logits[mode],
            difference=differences[mode],
            statistics=total(result.statistics for result in outcomes[mode]),
        )
        for mode in modes
    ]


def find_difference(
    expected: RequestResult, actual: RequestResult, mode: str, prompt: int
) -> Difference | None:
    """The first output token whose logits differ in any bit, or whose id differs."""
    assert expected.logits is not None and actual.logits is not None
    for position in range(min(len(expected.token_ids), len(actual.token_ids))):
        want, got = expected.logits[position], actual.logits[position]
        unequal = np.flatnonzero(want.view(np.uint32) != got.view(np.uint32))
        tokens = expected.token_ids[position], actual.token_ids[position]
        if len(unequal) or tokens[0] != tokens[1]:
            first = int(unequal[0]) if len(unequal) else None
            return Difference(
                mode=mode,
                prompt=prompt,
                position=position,
                expected_token=tokens[0],
                actual_token=tokens[1],
                vocabulary_id=first,
                expected_logit=None if first is None else float(want[first]),
                actual_logit=None if first is None else float(got[first]),
            )
    if len(expected.token_ids) == len(actual.token_ids):
        return None
    position = min(len(expected.token_ids), len(actual.token_ids))
    return Difference(
        mode=mode,
        prompt=prompt,
        position=position,
        expected_token=_token_at(expected, position),
        actual_token=_token_at(actual, position),
        vocabulary_id=None,
        expected_logit=None,
        actual_logit=None,
    )


def measure_speed(
    executor: Executor,
    requests: Sequence[Request],
    *,
    block_size: int | None,
    repeats: int,
    eos_token_ids: Sequence[int] = (),
    on_run: Callable[[], None] = lambda: None,
) -> Speed:
    """Times `requests` one by one, baseline and speculation in turn, `repeats` times each."""

    def run(speculation: bool) -> float:
        options = EngineOptions(
            speculation=speculation, block_size=block_size if speculation else None
        )
        engine = Engine(executor, eos_token_ids=eos_token_ids, options=options)
        statistics = [engine.generate([request])[0].statistics for request in requests]
        on_run()
        tokens = sum(one.output_tokens - 1 for one in statistics)
        seconds = sum(one.decode_s or 0.0 for one in statistics)
        return tokens / seconds if seconds else float("nan")

    runs = [(run(False), run(True)) for _ in range(repeats)]
    return Speed(baseline=tuple(b for b, _ in runs), speculative=tuple(s for _, s in runs))


def _parts(requests: Sequence[Request], size: int) -> Iterator[Sequence[Request]]:
    for start in range(0, len(requests), size):
        yield requests[start : start + size]


def _token_at(result: RequestResult, position: int) -> int | None:
    return result.token_ids[position] if position < len(result.token_ids) else None

"""Proof by comparison: speculation against the autoregressive baseline.

On an executor whose logits are bitwise reproducible, every bit must agree. On another, tokens
must agree up to ties: where they first part, the baseline's logits of the two tokens must differ by
less than the noise, which is measured between the two runs on the rows before any parting.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np

from dflash_trt.backends.base import Executor
from dflash_trt.core.limits import PREFILL_CHUNK
from dflash_trt.decoding.drafter_kinds import DFLASH, DRAFTERS, DrafterKind
from dflash_trt.decoding.generator import Generator
from dflash_trt.decoding.generator_options import GeneratorOptions
from dflash_trt.decoding.loops import is_looping
from dflash_trt.decoding.request import Request, RequestResult, TokenEvent
from dflash_trt.decoding.statistics import RequestStatistics, TotalStatistics, total


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """One way of running the prompts that must give what the baseline gives.

    `title` is what drafts are called.
    """

    speculation: bool
    batch: int
    block_size: int | None
    drafter: DrafterKind = DFLASH
    title: str = DRAFTERS[DFLASH]

    def __str__(self) -> str:
        name = f"{self.title} block {self.block_size}" if self.speculation else "target_only"
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
class Tie:
    """Where a prompt's tokens first part from the baseline's, and by how little.

    `gap` is the baseline's logit of its own token minus its logit of the other, at S = 1.
    """

    prompt: int
    position: int
    expected_token: int
    actual_token: int
    gap: float


@dataclass(slots=True, kw_only=True)
class ModeReport:
    """What one mode did, prompt by prompt, and where it departs from the baseline.

    `tokens` and `logits` count what was compared. `difference` is the first place where a bit
    differs. `ties` has an item per prompt whose tokens part; `noise` is the largest difference of
    a logit on rows before a parting. `has_cut_output` says that an output ended elsewhere though
    its tokens agree: never a tie. `of_prompts` and `are_looping` have an item per prompt.
    """

    mode: str
    is_bitwise: bool
    tokens: int = 0
    logits: int = 0
    difference: Difference | None = None
    ties: list[Tie] = field(default_factory=list)
    has_cut_output: bool = False
    noise: float = 0.0
    of_prompts: list[RequestStatistics] = field(default_factory=list)
    are_looping: list[bool] = field(default_factory=list)

    @property
    def statistics(self) -> TotalStatistics:
        return total(self.of_prompts)

    @property
    def is_lossless(self) -> bool:
        """No bit differs; on an executor without that promise, every parting is a tie."""
        if self.is_bitwise or self.difference is None:
            return self.difference is None
        return not self.has_cut_output and all(tie.gap <= self.noise for tie in self.ties)

    def add(self, prompt: int, expected: RequestResult, actual: RequestResult) -> None:
        """Compares what the baseline and the mode gave for prompt number `prompt`."""
        assert expected.logits is not None and actual.logits is not None
        self.tokens += len(actual.token_ids)
        self.logits += actual.logits.size
        self.of_prompts.append(actual.statistics)
        self.are_looping.append(is_looping(actual.token_ids))
        if self.difference is None:
            self.difference = find_difference(expected, actual, self.mode, prompt)
        pairs = zip(expected.token_ids, actual.token_ids, strict=False)
        parting = next((at for at, (want, got) in enumerate(pairs) if want != got), None)
        agreed = min(len(expected.token_ids), len(actual.token_ids)) if parting is None else parting
        if agreed:
            change = np.abs(actual.logits[:agreed] - expected.logits[:agreed])
            self.noise = max(self.noise, float(change.max()))
        if parting is None:
            self.has_cut_output |= len(expected.token_ids) != len(actual.token_ids)
            return
        row = expected.logits[parting]
        want, got = expected.token_ids[parting], actual.token_ids[parting]
        self.ties.append(
            Tie(
                prompt=prompt,
                position=parting,
                expected_token=want,
                actual_token=got,
                gap=float(row[want] - row[got]),
            )
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Decode tokens/s at batch 1 of baseline and speculation, runs interleaved.

    Each item is one run over the same prompts: sum of (n - 1) / sum of (E2E - TTFT); none when
    every output ended at its first token.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Interleaved runs of the same prompts; each item is one run, with an item for each prompt."""

    baseline: tuple[tuple[RequestStatistics, ...], ...] = ()
    speculative: tuple[tuple[RequestStatistics, ...], ...] = ()

    def speed(self, prompts: Collection[int] | None = None) -> Speed:
        """The speed over the prompts of these numbers, counted from 0; over all without."""

        def rate(run: Sequence[RequestStatistics]) -> float | None:
            each = [one for index, one in enumerate(run) if prompts is None or index in prompts]
            tokens = sum(one.output_tokens - 1 for one in each)
            seconds = sum(one.decode_s or 0.0 for one in each)
            return tokens / seconds if seconds else None

        pairs = zip(map(rate, self.baseline), map(rate, self.speculative), strict=True)
        # Outputs that end at their first token have no speed.
        runs = [(b, s) for b, s in pairs if b is not None and s is not None]
        return Speed(baseline=tuple(b for b, _ in runs), speculative=tuple(s for _, s in runs))


def verify(
    executor: Executor,
    requests: Sequence[Request],
    modes: Sequence[Mode],
    *,
    eos_token_ids: Sequence[int] = (),
    prefill_chunk: int = PREFILL_CHUNK,
    on_tokens: Callable[[int], None] = lambda count: None,
    baseline: Executor | None = None,
) -> list[ModeReport]:
    """Runs `requests` with target_only one by one, then in every mode, and compares.

    `baseline` is another executor to compare with. Batches are full: too few requests are repeated
    beside each other. `on_tokens` hears of every output token that is compared.
    """

    def run(runner: Executor, group: Sequence[Request], mode: Mode) -> list[RequestResult]:
        options = GeneratorOptions(
            speculation=mode.speculation,
            block_size=mode.block_size,
            drafter=mode.drafter,
            prefill_chunk=prefill_chunk,
            record_logits=True,
        )
        generator = Generator(runner, eos_token_ids=eos_token_ids, options=options)
        results: list[RequestResult] = []
        for part in _parts(group, mode.batch):
            count = len(part)

            def hear(index: int, event: TokenEvent, count: int = count) -> None:
                if index < count:
                    on_tokens(len(event.token_ids))

            full = [part[index % count] for index in range(mode.batch)]
            results += generator.generate(full, hear)[:count]
        return results

    baseline_mode = Mode(speculation=False, batch=1, block_size=None)
    reports = [ModeReport(mode=str(mode), is_bitwise=executor.is_bitwise) for mode in modes]
    offset = 0
    for group in _parts(requests, max((mode.batch for mode in modes), default=1)):
        expected = run(baseline or executor, group, baseline_mode)
        for mode, report in zip(modes, reports, strict=True):
            results = zip(expected, run(executor, group, mode), strict=True)
            for prompt, (want, got) in enumerate(results, start=offset):
                report.add(prompt, want, got)
        offset += len(group)
    return reports


def find_difference(
    expected: RequestResult, actual: RequestResult, mode: str, prompt: int
) -> Difference | None:
    """The first output token whose logits differ in any bit, or whose id differs."""
    assert expected.logits is not None and actual.logits is not None
    lengths = len(expected.token_ids), len(actual.token_ids)
    first: int | None = None
    for position in range(min(lengths)):
        want, got = expected.logits[position], actual.logits[position]
        unequal = np.flatnonzero(want.view(np.uint32) != got.view(np.uint32))
        if len(unequal):
            first = int(unequal[0])
        if len(unequal) or expected.token_ids[position] != actual.token_ids[position]:
            break
    else:
        if lengths[0] == lengths[1]:
            return None
        position = min(lengths)
    return Difference(
        mode=mode,
        prompt=prompt,
        position=position,
        expected_token=_token_at(expected, position),
        actual_token=_token_at(actual, position),
        vocabulary_id=first,
        expected_logit=None if first is None else float(want[first]),
        actual_logit=None if first is None else float(got[first]),
    )


def measure_speed(
    executor: Executor,
    requests: Sequence[Request],
    *,
    block_size: int | None,
    repeats: int,
    drafter: DrafterKind = DFLASH,
    eos_token_ids: Sequence[int] = (),
    on_run: Callable[[], None] = lambda: None,
) -> Timing:
    """Times `requests` one by one, baseline and speculation in turn, `repeats` times each."""

    def run(speculation: bool) -> tuple[RequestStatistics, ...]:
        options = GeneratorOptions(
            speculation=speculation,
            block_size=block_size if speculation else None,
            drafter=drafter,
        )
        generator = Generator(executor, eos_token_ids=eos_token_ids, options=options)
        statistics = [generator.generate([request])[0].statistics for request in requests]
        on_run()
        return tuple(statistics)

    pairs = [(run(False), run(True)) for _ in range(repeats)]
    return Timing(
        baseline=tuple(baseline for baseline, _ in pairs),
        speculative=tuple(speculative for _, speculative in pairs),
    )


def _parts(requests: Sequence[Request], size: int) -> Iterator[Sequence[Request]]:
    for start in range(0, len(requests), size):
        yield requests[start : start + size]


def _token_at(result: RequestResult, position: int) -> int | None:
    return result.token_ids[position] if position < len(result.token_ids) else None

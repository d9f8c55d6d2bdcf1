"""Figures for Prometheus, on the server's /metrics, and a line in its log."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

from dflash_trt.runtime import RequestStatistics
from dflash_trt.runtime.jobs import Load, Outcome
from dflash_trt.speculation.schedule import BlockSchedule
from dflash_trt.tuning.break_even import DraftedSteps, low_acceptance, schedule_break_even
from dflash_trt.version import __version__

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
TOKEN_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25)
_GAUGE_PERIOD_S = 0.1
FEWEST_STEPS = 256
"""Steps with drafts before anything is said of them: a few requests need not be like the others."""

REQUESTS = ("dflash_requests_total", "Requests by outcome.")
GRAMMARS = (
    "dflash_grammars_total",
    "Requests with a grammar, by whether it could be used: compiled, or refused.",
)
BUILD_INFO = ("dflash_build_info", "1, with the version of dflash-trt that serves.")
# By field of RequestStatistics: the family's name and description.
COUNTERS = {
    "prompt_tokens": (
        "dflash_prompt_tokens_total",
        "Prompt tokens of requests that ended with a result.",
    ),
    "cached_prompt_tokens": (
        "dflash_cached_prompt_tokens_total",
        "Prompt tokens that came from the prefix cache.",
    ),
    "preemptions": (
        "dflash_preemptions_total",
        "Times a request lost its pages and was computed again.",
    ),
    "output_tokens": (
        "dflash_output_tokens_total",
        "Output tokens of requests that ended with a result.",
    ),
    "steps": ("dflash_verify_steps_total", "Verify steps of the target, counted per request."),
    "step_tokens": (
        "dflash_step_tokens_total",
        "Tokens that verify steps emitted; divided by verify steps: tau.",
    ),
    "drafted_tokens": ("dflash_draft_tokens_total", "Draft tokens verified."),
    "accepted_tokens": ("dflash_accepted_draft_tokens_total", "Draft tokens accepted."),
    "constrained_steps": (
        "dflash_constrained_verify_steps_total",
        "Verify steps of requests with a grammar.",
    ),
    "constrained_step_tokens": (
        "dflash_constrained_step_tokens_total",
        "Tokens that those emitted; divided by them: tau with a grammar.",
    ),
    "forced_tokens": (
        "dflash_forced_draft_tokens_total",
        "Draft tokens that a grammar put in place of the drafter's.",
    ),
    "grammar_s": ("dflash_grammar_seconds_total", "Processor time in grammars, while decoding."),
}
HISTOGRAMS = {
    "queue_s": ("dflash_queue_seconds", "From arrival to the first prefill pass.", SECONDS),
    "time_to_first_token_s": (
        "dflash_time_to_first_token_seconds",
        "From arrival to the first token.",
        SECONDS,
    ),
    "time_per_output_token_s": (
        "dflash_time_per_output_token_seconds",
        "(end - first token) / (output tokens - 1), by request.",
        TOKEN_SECONDS,
    ),
}
GAUGES = {
    "dflash_slots": "Slots that there are: requests that run at a time.",
    "dflash_active_slots": "Slots that hold a request.",
    "dflash_waiting_requests": "Requests that wait for a slot.",
    "dflash_waiting_requests_limit": "Requests that may wait; beyond them they are refused.",
    "dflash_cached_tokens": "Positions of the KV caches that hold tokens.",
    "dflash_cache_usage_ratio": "Share of the KV caches that requests hold: positions, or pages.",
    "dflash_acceptance_length": "Tokens per verify step (tau) since the start.",
}
KINDS = {
    **dict.fromkeys(
        (REQUESTS[0], GRAMMARS[0], *(name for name, _ in COUNTERS.values())), "counter"
    ),
    **dict.fromkeys((name for name, _, _ in HISTOGRAMS.values()), "histogram"),
    **dict.fromkeys((BUILD_INFO[0], *GAUGES), "gauge"),
}
"""What a model exports: Prometheus's kind of each family."""


class AcceptanceWatch:
    """Adds up the requests that end; `warn` hears once that drafts cost more than they bring.

    Without a schedule that was measured it says nothing.
    """

    def __init__(self, schedule: BlockSchedule | None, warn: Callable[[str], object]) -> None:
        self._schedule, self._warn = schedule, warn
        self._steps = DraftedSteps()
        self._ended = schedule is None or schedule.measured is None

    def take(self, statistics: RequestStatistics) -> None:
        """Counts the steps of a request that ended."""
        if self._ended:
            return
        self._steps.add(statistics)
        if self._steps.count < FEWEST_STEPS:
            return
        break_even = schedule_break_even(self._schedule, self._steps.block)
        if line := low_acceptance(self._steps, break_even, "BUNDLE", fewest=FEWEST_STEPS):
            self._ended = True
            self._warn(line)


class Metrics:
    """Counts what ends, and shows the generator's `load` ten times a second, in its own thread.

    Every figure is a message to the server and takes it about 0.2 ms. `utils` is the module
    `triton_python_backend_utils`; `slots` requests run at a time, and `queue` may wait.
    `acceptance` hears of each request that got a result.
    """

    def __init__(
        self,
        utils: Any,
        load: Callable[[], Load],
        slots: int,
        queue: int,
        acceptance: AcceptanceWatch,
    ) -> None:
        self._load, self._acceptance = load, acceptance
        self._families: list[Any] = []  # a family must outlive its metrics
        family = utils.MetricFamily
        requests = self._family(utils, *REQUESTS, family.COUNTER)
        self._outcomes = {
            outcome: requests.Metric(labels={"outcome": outcome.value}) for outcome in Outcome
        }
        grammars = self._family(utils, *GRAMMARS, family.COUNTER)
        self._grammars = {
            usable: grammars.Metric(labels={"outcome": "compiled" if usable else "refused"})
            for usable in (True, False)
        }
        self._counters = {
            field: self._family(utils, name, text, family.COUNTER).Metric(labels={})
            for field, (name, text) in COUNTERS.items()
        }
        self._gauges = {
            name: self._family(utils, name, text, family.GAUGE).Metric(labels={})
            for name, text in GAUGES.items()
        }
        self._histograms = {
            field: self._family(utils, name, text, family.HISTOGRAM).Metric(
                labels={}, buckets=list(buckets)
            )
            for field, (name, text, buckets) in HISTOGRAMS.items()
        }
        info = self._family(utils, *BUILD_INFO, family.GAUGE).Metric(
            labels={"version": __version__}
        )
        info.set(1)
        self._gauges["dflash_slots"].set(slots)
        self._gauges["dflash_waiting_requests_limit"].set(queue)
        self._gauges[BUILD_INFO[0]] = info
        self._shown: dict[str, float] = {}
        self._steps = self._step_tokens = 0
        self._ended: SimpleQueue[tuple[Outcome, RequestStatistics | None] | bool | None]
        self._ended = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def record(self, outcome: Outcome, statistics: RequestStatistics | None = None) -> None:
        """Counts a request that ended; `statistics` where it got a result."""
        self._ended.put((outcome, statistics))

    def record_grammar(self, usable: bool) -> None:
        """Counts a request with a grammar."""
        self._ended.put(usable)

    def close(self) -> None:
        self._ended.put(None)
        self._thread.join()
        # The server insists on this order.
        for metrics in (
            self._outcomes,
            self._grammars,
            self._counters,
            self._gauges,
            self._histograms,
        ):
            metrics.clear()
        self._families.clear()

    def _family(self, utils: Any, name: str, text: str, kind: Any) -> Any:
        family = utils.MetricFamily(name=name, description=text, kind=kind)
        self._families.append(family)
        return family

    def _run(self) -> None:
        while True:
            try:
                ended = self._ended.get(timeout=_GAUGE_PERIOD_S)
            except Empty:
                self._show_load()
                continue
            if ended is None:
                return
            if isinstance(ended, bool):
                self._grammars[ended].increment(1)
                continue
            outcome, statistics = ended
            if statistics is not None:
                self._count(statistics)
                self._acceptance.take(statistics)
            # The outcome last: whoever sees it sees all figures of that request.
            self._outcomes[outcome].increment(1)
            self._show_load()

    def _count(self, one: RequestStatistics) -> None:
        self._steps += one.steps
        self._step_tokens += one.step_tokens
        for field, counter in self._counters.items():
            if value := getattr(one, field):
                counter.increment(value)
        for field, histogram in self._histograms.items():
            if (seconds := getattr(one, field)) is not None:
                histogram.observe(seconds)

    def _show_load(self) -> None:
        load = self._load()
        figures: dict[str, float] = {
            "dflash_active_slots": load.active,
            "dflash_waiting_requests": load.waiting,
            "dflash_cached_tokens": load.cached_tokens,
            "dflash_cache_usage_ratio": load.cache_usage,
        }
        if self._steps:
            figures["dflash_acceptance_length"] = self._step_tokens / self._steps
        for name, value in figures.items():
            if self._shown.get(name) != value:
                self._gauges[name].set(value)
                self._shown[name] = value

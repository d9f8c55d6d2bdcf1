"""Figures for Prometheus, on the server's /metrics."""

from __future__ import annotations

import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from dflash_trt.decoding import RequestStatistics
from dflash_trt.decoding.jobs import Outcome
from dflash_trt.decoding.statistics import RunningTotals
from dflash_trt.decoding.worker import GeneratorWorker
from dflash_trt.version import __version__

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
LONG_SECONDS = (*SECONDS[4:], 60.0, 120.0, 300.0, 600.0)
TOKEN_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25)
TOKENS = tuple(float(1 << power) for power in range(18))
_GAUGE_PERIOD_S = 0.1
_COUNTER_PERIOD_S = 0.5  # there are more of them

# Families by name: what they tell; of counters first the field of RunningTotals that they show, of
# histograms the field of RequestStatistics, and their buckets.
_LABELLED = {
    "dflash_requests_total": "Requests by outcome.",
    "dflash_grammars_total": "Requests with a grammar, by whether it could be used.",
    "dflash_accepted_draft_tokens_by_position_total": "Accepted, by place in the block, from 1.",
}
_COUNTERS = {
    "dflash_prompt_tokens_total": ("prompt_tokens", "Prompt tokens in the caches."),
    "dflash_cached_prompt_tokens_total": ("cached_prompt_tokens", "Those from the prefix cache."),
    "dflash_preemptions_total": ("preemptions", "Times a request lost its pages."),
    "dflash_yields_total": ("yields", "Times a request gave its slot for another's turn."),
    "dflash_output_tokens_total": ("output_tokens", "Output tokens."),
    "dflash_verify_steps_total": ("steps", "Verify steps of the target, counted per request."),
    "dflash_drafted_steps_total": ("drafted_steps", "Those of them that had a draft."),
    "dflash_step_tokens_total": ("step_tokens", "Tokens that verify steps emitted."),
    "dflash_draft_tokens_total": ("drafted_tokens", "Draft tokens verified."),
    "dflash_accepted_draft_tokens_total": ("accepted_tokens", "Draft tokens accepted."),
    "dflash_constrained_verify_steps_total": ("constrained_steps", "Verify steps with a grammar."),
    "dflash_constrained_step_tokens_total": ("constrained_step_tokens", "Tokens of these steps."),
    "dflash_forced_draft_tokens_total": ("forced_tokens", "Draft tokens that a grammar put in."),
    "dflash_grammar_seconds_total": ("grammar_s", "Processor time in grammars, while decoding."),
}
_HISTOGRAMS = {
    "dflash_queue_seconds": ("queue_s", "From arrival to the first prefill pass.", SECONDS),
    "dflash_time_to_first_token_seconds": (
        "time_to_first_token_s",
        "From arrival to the first token.",
        SECONDS,
    ),
    "dflash_time_per_output_token_seconds": (
        "time_per_output_token_s",
        "(end - first token) / (output tokens - 1), by request.",
        TOKEN_SECONDS,
    ),
    "dflash_request_seconds": ("end_to_end_s", "From arrival to the end.", LONG_SECONDS),
    "dflash_request_prompt_tokens": ("prompt_tokens", "Of a prompt.", TOKENS),
    "dflash_request_output_tokens": ("output_tokens", "Of an output.", TOKENS),
}
_GAUGES = {
    "dflash_build_info": "1, with the version of dflash-trt that serves, and how it decodes.",
    "dflash_slots": "Slots that there are: requests that run at a time.",
    "dflash_active_slots": "Slots that hold a request.",
    "dflash_waiting_requests": "Requests that wait for a slot.",
    "dflash_waiting_requests_limit": "Requests that may wait; beyond them they are refused.",
    "dflash_cached_tokens": "Positions of the KV caches that hold tokens.",
    "dflash_cache_usage_ratio": "Share of the KV caches that requests hold: positions, or pages.",
    "dflash_acceptance_length": "Tokens per verify step (tau) since the start.",
}
KINDS = {
    **dict.fromkeys((*_LABELLED, *_COUNTERS), "counter"),
    **dict.fromkeys(_HISTOGRAMS, "histogram"),
    **dict.fromkeys(_GAUGES, "gauge"),
}
"""What a model exports: Prometheus's kind of each family."""


def read_totals(figures: bytes) -> RunningTotals:
    """The counters among a server's `figures`; 0 where it tells none."""
    totals, text = RunningTotals(), figures.decode()
    for name, (field, _) in _COUNTERS.items():
        for value in re.findall(rf"^{name}\S* (\S+)$", text, re.MULTILINE):
            setattr(totals, field, float(value))
    return totals


class Metrics:
    """Shows what `worker` does while it does it, and counts what ends, in its own thread.

    Every figure is a message to the server and takes it about 0.2 ms. `utils` is the module
    `triton_python_backend_utils`; `slots` requests run at a time, and `queue` may wait. `about`
    are labels: the "model", and how it decodes.
    """

    def __init__(
        self, utils: Any, worker: GeneratorWorker, about: Mapping[str, str], slots: int, queue: int
    ) -> None:
        self._worker, self._utils, self._model = worker, utils, about["model"]
        self._families: list[Any] = []  # a family must outlive its metrics
        requests, grammars, self._positions = (self._family(*one) for one in _LABELLED.items())
        # What ends, by outcome, and grammars, by whether they could be used.
        self._ends = {one: self._metric(requests, {"outcome": one.value}) for one in Outcome}
        self._grammars = {
            usable: self._metric(grammars, {"outcome": outcome})
            for usable, outcome in ((True, "compiled"), (False, "refused"))
        }
        self._counters: dict[str | int, Any] = {
            field: self._metric(self._family(name, text))
            for name, (field, text) in _COUNTERS.items()
        }
        self._gauges: dict[str, Any] = {}
        for name, text in _GAUGES.items():
            labels = {"version": __version__, **about} if name == "dflash_build_info" else {}
            self._gauges[name] = self._metric(self._family(name, text), labels)
        self._histograms = {
            field: self._metric(self._family(name, text), buckets=list(buckets))
            for name, (field, text, buckets) in _HISTOGRAMS.items()
        }
        self._shown: dict[str, float] = {}
        limits = {"dflash_slots": slots, "dflash_waiting_requests_limit": queue}
        self._show({"dflash_build_info": 1, **limits})
        self._totals, self._told = worker.totals, dict[str | int, float]()
        self._told_at = 0.0
        self._sums = defaultdict[str | int, float](float)
        self._ended: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def record(self, outcome: Outcome, statistics: RequestStatistics | None = None) -> None:
        """Counts a request that ended; `statistics` where it got a result."""
        self._ended.put(partial(self._count, outcome, statistics))

    def record_grammar(self, usable: bool) -> None:
        """Counts a request with a grammar."""
        self._ended.put(partial(self._grammars[usable].increment, 1))

    def close(self) -> None:
        self._ended.put(None)
        self._thread.join()
        # The server insists on this order.
        counted = (self._ends, self._grammars, self._counters)
        for metrics in (*counted, self._gauges, self._histograms):
            metrics.clear()
        self._families.clear()

    def _family(self, name: str, text: str) -> Any:
        kind = getattr(self._utils.MetricFamily, KINDS[name].upper())
        family = self._utils.MetricFamily(name=name, description=text, kind=kind)
        self._families.append(family)
        return family

    def _metric(self, family: Any, labels: dict[str, str] | None = None, **more: Any) -> Any:
        return family.Metric(labels={"model": self._model, **(labels or {})}, **more)

    def _run(self) -> None:
        while True:
            try:
                count = self._ended.get(timeout=_GAUGE_PERIOD_S)
                if count is None:
                    return
                count()
            except Empty:
                pass
            if time.monotonic() - self._told_at >= _COUNTER_PERIOD_S:
                self._tell_totals()
            self._show_load()

    def _tell_totals(self) -> None:
        """Lets the counters follow; a generator that was opened anew begins at 0."""
        self._told_at = time.monotonic()
        for totals in (self._totals, self._worker.totals):
            if totals is not self._totals:
                self._totals, self._told = totals, {}
            found: dict[str | int, float] = {f: getattr(totals, f) for f, _ in _COUNTERS.values()}
            found |= dict(enumerate(totals.position_accepts, start=1))
            for field, value in found.items():
                if field not in self._counters:
                    labels = {"position": str(field)}
                    self._counters[field] = self._metric(self._positions, labels)
                if (more := value - self._told.get(field, 0)) > 0:
                    self._counters[field].increment(more)
                    self._sums[field] += more
            self._told = found

    def _count(self, outcome: Outcome, one: RequestStatistics | None) -> None:
        self._tell_totals()
        for field, histogram in self._histograms.items() if one is not None else ():
            if (value := getattr(one, field)) is not None:
                histogram.observe(value)
        # The outcome last: whoever sees it sees all figures of that request.
        self._ends[outcome].increment(1)

    def _show_load(self) -> None:
        load = self._worker.load
        figures: dict[str, float] = {
            "dflash_active_slots": load.active,
            "dflash_waiting_requests": load.waiting,
            "dflash_cached_tokens": load.cached_tokens,
            "dflash_cache_usage_ratio": load.cache_usage,
        }
        if steps := self._sums["steps"]:
            figures["dflash_acceptance_length"] = self._sums["step_tokens"] / steps
        self._show(figures)

    def _show(self, figures: dict[str, float]) -> None:
        for name, value in figures.items():
            if self._shown.get(name) != value:
                self._gauges[name].set(value)
                self._shown[name] = value

"""The generator: continuous batching of speculative (or plain) decoding over one executor."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from tokenizers import Tokenizer

from dflash_trt.backends.base import (
    Executor,
    Int64Array,
    Scores,
    SpeculationOutput,
    StepCall,
    TargetCall,
    TargetGraph,
    TargetOutput,
)
from dflash_trt.errors import DflashError
from dflash_trt.runtime.admission import check_block_size, check_request
from dflash_trt.runtime.events import TokenEvent, make_event
from dflash_trt.runtime.options import GeneratorOptions
from dflash_trt.runtime.pacing import Pacer
from dflash_trt.runtime.paging import open_page_tables
from dflash_trt.runtime.request import Request, RequestResult, RequestState
from dflash_trt.runtime.scheduler import DecodeBatch, PrefillChunk, Scheduler
from dflash_trt.runtime.scores import (
    RowScores,
    needed_scores,
    rows_by_sequence,
    sampling_input,
)
from dflash_trt.runtime.statistics import StatisticsRecorder
from dflash_trt.runtime.timing import TimedExecutor
from dflash_trt.sampling.acceptance import accept_block
from dflash_trt.text.detokenise import TextStream


class RequestFailedError(DflashError):
    """Request `request_id` cannot continue. The others can, once it is cancelled."""

    def __init__(self, request_id: int, error: DflashError) -> None:
        super().__init__(error.what, where=error.where, fix=error.fix, usage=error.usage)
        self.request_id = request_id


class Generator:
    """Runs requests to their end; `step` is the synchronous core, for one thread.

    A request's tokens depend on its prompt, parameters and seed only: not on its neighbours,
    the chunking, the block size, or speculation itself, given an executor whose logits do not.

    Args:
        executor: used by this generator alone while it has work; with paged caches, for good: pages
            keep the prefixes of requests that have ended.
        tokenizer: for text and stop strings; without it events have no text.
        eos_token_ids: the model's end-of-sequence ids.
        clock: seconds, monotonic.

    `executor_seconds` and `step_seconds` accumulate the time inside the executor and inside
    `step` (or `cancel`); their difference is the host's own.

    Raises:
        DflashError: options outside the executor's limits (usage).
    """

    def __init__(
        self,
        executor: Executor,
        *,
        tokenizer: Tokenizer | None = None,
        eos_token_ids: Iterable[int] = (),
        options: GeneratorOptions | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._options = options or GeneratorOptions()
        self._executor = TimedExecutor(executor, clock)
        self._limits = executor.limits
        self._tokenizer = tokenizer
        self._eos_token_ids = frozenset(eos_token_ids)
        self._clock = clock
        check_block_size(self._options.block_size, self._limits)
        schedule = self._options.schedule
        self._pacer = None if schedule is None else Pacer(schedule, self._limits)
        self._graph: TargetGraph = "target" if self._options.speculation else "target_only"
        self._chunk = self._limits.chunk(self._options.prefill_chunk)
        # A step whose logits are wanted brings them to the host before the next one begins.
        may_draft = self._options.speculation and not self._options.record_logits
        self._looks_ahead = self._limits.draws and may_draft
        self._paging = open_page_tables(executor)
        self._scheduler = Scheduler(
            self._limits.max_batch,
            self._limits.max_seq_len,
            self._chunk,
            self._executor.move_slot,
            self._paging,
            looks_ahead=self._looks_ahead,
        )
        self._live: dict[int, RequestState] = {}
        self._next_id = 0
        self._events: list[TokenEvent] = []
        self.step_seconds = 0.0

    @property
    def executor_seconds(self) -> float:
        """Time spent inside the executor."""
        return self._executor.seconds

    @property
    def has_work(self) -> bool:
        """True while a request is live or an event is waiting for the next `step`."""
        return bool(self._live or self._events)

    @property
    def used_slots(self) -> int:
        """Slots that hold a request, decoding or prefilling."""
        return len(self._scheduler.running)

    @property
    def cached_tokens(self) -> int:
        """Cache positions that hold accepted tokens, in all slots together."""
        return sum(state.cached_length for state in self._scheduler.running)

    @property
    def cache_usage(self) -> float:
        """The share of the caches that requests hold, 0 … 1: pages, or positions of linear slots.

        Pages that only keep a prefix for later do not count.
        """
        if self._paging is not None:
            return self._paging.usage
        return self.cached_tokens / (self._limits.max_batch * self._limits.max_seq_len)

    def check(self, request: Request) -> None:
        """Raises DflashError (usage) when this generator cannot run `request`."""
        check_request(request, self._limits, self._tokenizer is not None)

    def submit(self, request: Request, submitted_at: float | None = None) -> int:
        """Queues `request` and returns its id, which its events carry.

        `submitted_at` is the clock's time that its statistics count from; None is now.

        Raises:
            DflashError: this generator cannot run it (see `check`).
        """
        self.check(request)
        request_id, self._next_id = self._next_id, self._next_id + 1
        state = RequestState(
            request_id=request_id,
            request=request,
            max_tokens=self._clip_max_tokens(request),
            rows=self._choose_rows(request),
            stop_ids=frozenset(request.stop_token_ids)
            | (frozenset() if request.ignore_eos else self._eos_token_ids),
            stream=None
            if self._tokenizer is None
            else TextStream(self._tokenizer, request.stop_strings),
            recorder=StatisticsRecorder(self._clock() if submitted_at is None else submitted_at),
        )
        self._live[request_id] = state
        self._scheduler.add(state)
        return request_id

    def cancel(self, request_id: int) -> bool:
        """Ends a request between steps, wherever it is; its last event comes with the next step.

        Returns False when it has already finished.
        """
        state = self._live.get(request_id)
        if state is None:
            return False
        started = self._clock()
        state.finish_reason = "cancelled"
        self._emit(state, 0, 0)
        self._finish(state)
        self.step_seconds += self._clock() - started
        return True

    def step(self) -> list[TokenEvent]:
        """One decode step of every running request, then one chunk of the oldest prompt.

        Returns what happened, in order; nothing when there was no work. When it raises, the
        generator is still whole: the next call does what was left undone.

        Raises:
            RequestFailedError: a request's logits were not finite (a greedy request's are looked
                at for its first token, a sampled or recorded one's for all; where the executor
                draws, everyone's for all).
            DflashError: the executor failed.
        """
        started = self._clock()
        most_rows = None
        if self._pacer is not None and self._scheduler.decoding:
            most_rows = self._pacer.begin_step(self._scheduler.decoding)
        try:
            batches = self._scheduler.plan_decode(most_rows)
            for batch in batches:
                alone = self._looks_ahead and len(batches) == 1
                self._decode(batch, goes_on=alone and not self._scheduler.will_prefill)
        finally:
            # Slots move only after the last pass: the planned batches name them.
            for state in self._scheduler.decoding:
                if state.finish_reason is not None:
                    self._finish(state)
        chunk = self._scheduler.plan_prefill()
        if chunk is not None:
            self._prefill(chunk)
        elif self._pacer is not None:
            self._pacer.fill_gap(self._executor, self._scheduler.decoding, self._chunk)
        events, self._events = self._events, []
        self.step_seconds += self._clock() - started
        return events

    def generate(
        self,
        requests: Sequence[Request],
        on_tokens: Callable[[int, TokenEvent], None] | None = None,
    ) -> list[RequestResult]:
        """Runs `requests` to their end; results in their order.

        `on_tokens(index, event)` is called for the request at `index` after each step that
        did something for it; it may call `cancel(event.request_id)`. When it raises, all of
        `requests` are cancelled. The generator must be idle before.

        Raises:
            DflashError: a request that cannot run, before any of them does.
        """
        if self.has_work:
            raise ValueError("generate needs an idle generator")
        for request in requests:
            self.check(request)
        index_of = {self.submit(request): index for index, request in enumerate(requests)}
        results: dict[int, RequestResult] = {}
        try:
            while self._live or self._events:
                for event in self.step():
                    if event.result is not None:
                        results[event.request_id] = event.result
                    if on_tokens is not None:
                        on_tokens(index_of[event.request_id], event)
        finally:
            for request_id in index_of:
                self.cancel(request_id)
            self._events.clear()
        return [results[request_id] for request_id in index_of]

    def _decode(self, batch: DecodeBatch, *, goes_on: bool) -> None:
        """One pass over `batch`.

        `goes_on` allows the executor to begin the next step of the same requests ahead of time.
        """
        states, rows = batch.states, batch.rows
        anchors = np.array([state.token_ids[-1] for state in states], dtype=np.int64)
        starts = np.array([state.cached_length for state in states], dtype=np.int64)
        scores = max(map(self._needed_scores, states))
        sampling = self._pack_sampling(states)
        output: SpeculationOutput | TargetOutput
        if rows > 1:
            ahead = goes_on and not any(state.ends_next for state in states)
            step = StepCall(batch.first_slot, anchors, starts, rows, scores, sampling, ahead)
            output = self._executor.speculate(step)
            drafts = output.token_ids[:, 1:].tolist()
        else:
            graph = self._graph if self._pacer is None else self._pacer.fallback
            row, ids = np.zeros((len(states), 1), dtype=np.int64), anchors[:, None]
            plain = TargetCall(graph, batch.first_slot, ids, starts, row, scores, sampling)
            output = self._executor.forward(plain)
            drafts = [[] for _ in states]
            if graph != self._graph:
                for state in states:
                    state.skip_injection()
        for state, draft, known in zip(states, drafts, self._rows(output), strict=True):
            with _blaming(state):
                tokens = accept_block(draft, _make_chooser(state, known))
                emitted = self._take(state, tokens, known)
            trials, accepted = state.recorder.record_step(rows, len(tokens), emitted)
            if self._pacer is not None and trials:
                self._pacer.count(rows, trials, accepted)
            self._emit(state, emitted, min(len(tokens) - 1, emitted))

    def _prefill(self, chunk: PrefillChunk) -> None:
        """One prompt chunk; the last one also yields the request's first token.

        A preempted request keeps its output; only its cache rows are computed again.
        """
        state, length = chunk.state, len(chunk.token_ids)
        chooses = chunk.is_last and not state.token_ids
        reads_logits = self._options.record_logits or not self._limits.draws
        if state.recorder.started_at is None:
            state.recorder.started_at = self._clock()
        graph = self._graph
        if self._pacer is not None:
            graph = self._pacer.prefill_graph(state, self._scheduler.upcoming)
        call = TargetCall(
            graph,
            chunk.slot,
            np.array([chunk.token_ids], dtype=np.int64),
            np.array([state.prefilled], dtype=np.int64),
            np.array([[length - 1]], dtype=np.int64),
            # Of a greedy request too: one row shows whether the target's numbers are numbers, which
            # an executor that draws says itself.
            Scores.LOGITS if chooses and reads_logits else Scores.NONE,
            self._pack_sampling([state]),
        )
        output = self._executor.forward(call)
        if graph != self._graph:
            state.skip_injection()
        if not chooses:
            state.prefilled += length
            if chunk.is_last:
                self._start_decoding()
            return
        (known,) = self._rows(output)
        with _blaming(state):
            token = _make_chooser(state, known)(0)
            self._take(state, [token], known)
        state.prefilled += length
        state.recorder.first_token_at = self._clock()
        self._emit(state, 1, 0)
        if state.finish_reason is None:
            self._start_decoding()
        else:
            self._finish(state)

    def _start_decoding(self) -> None:
        self._scheduler.start_decoding()
        self._executor.release_slots(self._scheduler.used_slots)

    def _take(self, state: RequestState, tokens: list[int], known: RowScores) -> int:
        """Appends `tokens` up to the end of the output; returns how many were taken."""
        if state.request.sampling.greedy:  # drawing looks for itself
            known.check(len(tokens), state.next_position)
        taken = state.append_tokens(tokens)
        if self._options.record_logits and known.logits is not None:
            state.logits.extend(row.copy() for row in known.logits[:taken])
        return taken

    def _emit(self, state: RequestState, taken: int, accepted_tokens: int) -> None:
        self._events.append(make_event(state, taken, accepted_tokens, self._clock()))

    def _finish(self, state: RequestState) -> None:
        self._scheduler.release(state)
        self._executor.release_slots(self._scheduler.used_slots)
        del self._live[state.request_id]

    def _rows(self, output: SpeculationOutput | TargetOutput) -> list[RowScores]:
        return rows_by_sequence(output, is_drawn=self._limits.draws)

    def _pack_sampling(self, states: Sequence[RequestState]) -> Int64Array | None:
        return sampling_input(self._limits, [state.request.sampling for state in states])

    def _needed_scores(self, state: RequestState) -> Scores:
        if self._options.record_logits:
            return Scores.LOGITS
        return needed_scores(self._limits, state.request.sampling)

    def _clip_max_tokens(self, request: Request) -> int:
        room = self._limits.max_seq_len - len(request.prompt_ids)
        return room if request.max_tokens is None else min(request.max_tokens, room)

    def _choose_rows(self, request: Request) -> int:
        if not (self._options.speculation and request.speculate):
            return 1
        return request.block_size or self._options.block_size or self._limits.block_size


@contextmanager
def _blaming(state: RequestState) -> Iterator[None]:
    """Turns an error about `state` into one that names its request."""
    try:
        yield
    except DflashError as error:
        raise RequestFailedError(state.request_id, error) from error


def _make_chooser(state: RequestState, known: RowScores) -> Callable[[int], int]:
    """The target's token by logit row, for rows that continue `state`'s output in order."""
    sampling, first_position = state.request.sampling, state.next_position
    return lambda row: known.choose(row, first_position + row, sampling)

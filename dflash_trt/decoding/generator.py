"""The generator: continuous batching of speculative (or plain) decoding over one executor."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Sequence

import numpy as np
from tokenizers import Tokenizer

from dflash_trt.backends.base import (
    Executor,
    Int64Array,
    Scores,
    SpeculationOutput,
    StepCall,
    TargetCall,
    TargetOutput,
)
from dflash_trt.decoding.drafters import open_drafter
from dflash_trt.decoding.generator_options import GeneratorOptions
from dflash_trt.decoding.pacers import open_pacer
from dflash_trt.decoding.paging import PageObserver, open_page_tables
from dflash_trt.decoding.request import (
    Request,
    RequestResult,
    TokenEvent,
    check_block_size,
    check_request,
)
from dflash_trt.decoding.scheduler import DecodeBatch, PrefillChunk, Scheduler
from dflash_trt.decoding.scores import (
    needed_scores,
    open_penalties,
    sampling_input,
    settle,
    takes_choices,
)
from dflash_trt.decoding.state import RequestState
from dflash_trt.decoding.statistics import RunningTotals, StatisticsRecorder, Stopwatch
from dflash_trt.text.detokenise import TextStream, special_ids


class Generator:
    """Runs requests to their end; `step` is the synchronous core, for one thread.

    A request's tokens depend only on its prompt, parameters and seed: not on its neighbours,
    the chunking, the block size or speculation, given an executor whose logits do not.

    Args:
        executor: used by this generator alone while it has work; for good where caches are
            paged, since pages keep the prefixes of requests that have ended.
        tokenizer: for text and stop strings; without it events have no text.
        eos_token_ids: the model's end-of-sequence ids.
        clock: seconds, monotonic.

    `totals` has what all requests have done by now.

    Raises DflashError (usage): options outside the executor's limits.
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
        self._executor, self._limits = executor, executor.limits
        self._executor_time, self._step_time = Stopwatch(clock), Stopwatch(clock)
        self._tokenizer = tokenizer
        self._eos_token_ids = frozenset(eos_token_ids)
        self._clock = clock
        check_block_size(self._options.block_size, self._limits)
        self._pacer = open_pacer(self._options, self._limits, clock)
        self._drafter = open_drafter(self._options.drafter, executor)
        self._graph = self._options.graph
        self._chunk = self._limits.chunk(self._options.prefill_chunk)
        # Wanted logits come to the host before the next step; a dropped step would move states on.
        may_draft = self._options.speculation and not self._options.record_logits
        self._looks_ahead = self._limits.draws and may_draft and not self._limits.has_state
        self._paging = open_page_tables(executor, self._chunk)
        self._scheduler = Scheduler(
            self._limits.max_batch,
            self._limits.max_seq_len,
            self._chunk,
            self._move_slot,
            self._paging,
            looks_ahead=self._looks_ahead,
            copies_prefix=not self._limits.has_state,
            drafts_end=self._limits.drafts_end if self._graph == "target" else None,
        )
        self._rules = self._limits.draws, self._options.record_logits
        self._first_rows = np.zeros((self._limits.max_batch, 1), np.int64)
        self._live: dict[int, RequestState] = {}
        self._next_id = 0
        self._events: list[TokenEvent] = []
        self.totals = RunningTotals()

    @property
    def step_seconds(self) -> float:
        """Time spent in `step` and `cancel`."""
        return self._step_time.seconds

    @property
    def executor_seconds(self) -> float:
        """Time spent in the executor, a part of `step_seconds`."""
        return self._executor_time.seconds

    @property
    def has_work(self) -> bool:
        """True while a request is live or an event waits for the next `step`."""
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
        """Share of the caches that requests hold, 0 … 1; pages kept for a prefix do not count."""
        if self._paging is not None:
            return self._paging.usage
        return self.cached_tokens / (self._limits.max_batch * self._limits.max_seq_len)

    def warm_up(self) -> None:
        """Lets the executor get ready for the steps of this generator."""
        batches = range(1, self._limits.max_batch + 1)
        drafts = self._graph == "target"
        rows = {batch: self._pacer.block_size(batch) if drafts else 1 for batch in batches}
        self._executor.warm_up(rows, self._graph)

    def observe_pages(self, observer: PageObserver) -> None:
        """Tells `observer` which pages can be shared; nothing where caches are linear."""
        if self._paging is not None:
            self._paging.observe(observer)

    def check(self, request: Request) -> None:
        """Raises DflashError (usage) when this generator cannot run `request`."""
        check_request(request, self._limits, self._tokenizer is not None)

    def submit(
        self, request: Request, submitted_at: float | None = None, flow: Hashable = None
    ) -> int:
        """Queues `request` and returns its id, which its events carry.

        `submitted_at` is the clock's time that its statistics count from; None is now. Requests of
        one `flow` share the slots with other flows as one would; None makes it one of its own.

        Raises DflashError: this generator cannot run it (see `check`).
        """
        self.check(request)
        request_id, self._next_id = self._next_id, self._next_id + 1
        drafts = self._options.speculation and request.speculate
        block_size = request.block_size or self._options.block_size or self._limits.block_size
        records = self._options.record_logits
        room = self._limits.max_seq_len - len(request.prompt_ids)
        eos_token_ids = frozenset[int]() if request.ignore_eos else self._eos_token_ids
        stream = None
        if (tokenizer := self._tokenizer) is not None:
            shown = () if request.skip_special_tokens else special_ids(tokenizer)
            keeps = request.include_stop_str_in_output
            stream = TextStream(tokenizer, request.stop_strings, shown, keeps_stop=keeps)
        masks = request.holds_ends or not request.rules.is_neutral
        grammar = request.grammar
        now = self._clock() if submitted_at is None else submitted_at
        state = RequestState(
            request_id=request_id,
            request=request,
            max_tokens=min(request.max_tokens or room, room),
            rows=block_size if drafts else 1,
            scores=Scores.LOGITS if records else needed_scores(self._limits, request),
            takes_choices=takes_choices(self._limits, request),
            stop_ids=eos_token_ids.union(request.stop_token_ids),
            stream=stream,
            recorder=StatisticsRecorder(
                now, self.totals, grammar_s=None if grammar is None else 0.0
            ),
            flow=request_id if flow is None else flow,
            follower=None if grammar is None else grammar.fork(),
            penalties=open_penalties(request),
            mask=request.rules.mask(self._limits.vocab_size) if masks else None,
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
        with self._step_time:
            state.finish_reason = "cancelled"
            self._events.append(state.to_event(0, 0, self._clock()))
            self._finish(state)
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
        with self._step_time:
            self._decode_all()
            chunk = self._scheduler.plan_prefill()
            if chunk is not None:
                self._prefill(chunk)
        events, self._events = self._events, []
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

    def _decode_all(self) -> None:
        states = self._scheduler.slots.decoding
        most_rows = self._pacer.begin_step(states) if states else None
        try:
            batches = self._scheduler.plan_decode(most_rows)
            goes_on = self._looks_ahead and not self._scheduler.will_prefill
            for batch in batches:
                self._decode(batch, goes_on=goes_on)
            if batches:
                self._pacer.end_step()
        finally:
            # Slots move only after the last pass: the planned batches name them.
            for state in self._scheduler.slots.decoding:
                if state.finish_reason is not None:
                    self._finish(state)

    def _decode(self, batch: DecodeBatch, *, goes_on: bool) -> None:
        """One pass over `batch`; `goes_on`: the executor may begin the same requests' next step."""
        states, rows = batch.states, batch.rows
        anchors = _int64([state.token_ids[-1] for state in states])
        scores = max([state.scores for state in states])
        output: SpeculationOutput | TargetOutput
        if rows > 1:
            starts, sampling = self._pack(states)
            # A step whose rows are wanted brings them to the host before the next one begins.
            ahead = goes_on and scores is Scores.NONE and not any(one.ends_next for one in states)
            step = StepCall(batch.first_slot, anchors, starts, rows, scores, sampling, ahead)
            with self._executor_time:
                output, drafts = self._drafter.speculate(step, states)
        else:
            output = self._forward(batch.first_slot, states, anchors[:, None], scores)
            drafts = [[]] * len(states)
        choices = output.choice_ids.tolist()
        for index, state in enumerate(states):
            draft = drafts[index]
            settled, emitted = settle(state, draft, choices[index], output, index, *self._rules)
            trials, accepted = state.recorder.record_step(1 + len(draft), settled, emitted)
            if rows > 1:
                self._pacer.count(rows, trials, accepted)
            self._events.append(state.to_event(emitted, accepted, self._clock()))

    def _prefill(self, chunk: PrefillChunk) -> None:
        """One prompt chunk; the last one also yields the request's first token.

        A preempted request keeps its output; only its cache rows are computed again.
        """
        state, length = chunk.state, len(chunk.token_ids)
        chooses = chunk.is_last and not state.token_ids
        reads_logits = not self._limits.draws or state.scores is Scores.LOGITS
        if state.recorder.started_at is None:
            state.recorder.started_at = self._clock()
        # Of a greedy request too: one row shows whether the target's logits are finite.
        every = state.scores_prompt
        scores = Scores.LOGITS if every or (chooses and reads_logits) else Scores.NONE
        token_ids = np.array([chunk.token_ids], dtype=np.int64)
        output = self._forward(
            chunk.slot, [state], token_ids, scores, is_chunk=True, every_row=every
        )
        if every and output.logits is not None:
            state.score_prompt(output.logits[0])
            output = TargetOutput(output.choice_ids[:, -1:], output.logits[:, -1:])
        if not chooses:
            state.advance_prefill(length)
            if chunk.is_last:
                self._start_decoding()
            return
        settle(state, (), output.choice_ids[0].tolist(), output, 0, *self._rules)
        state.advance_prefill(length)
        state.recorder.first_token_at = self._clock()
        self._events.append(state.to_event(1, 0, self._clock()))
        if state.finish_reason is None:
            self._start_decoding()
        else:
            self._finish(state)

    def _forward(
        self,
        first_slot: int,
        states: Sequence[RequestState],
        token_ids: Int64Array,
        scores: Scores,
        *,
        is_chunk: bool = False,
        every_row: bool = False,
    ) -> TargetOutput:
        starts, sampling = self._pack(states)
        rows = token_ids.shape[1]
        picked = self._first_rows[: len(states)]
        if rows > 1:
            picked = np.arange(0 if every_row else rows - 1, rows, dtype=np.int64)[None]
        call = TargetCall(
            self._graph, first_slot, token_ids, starts, picked, scores, sampling, is_chunk
        )
        with self._executor_time:
            return self._executor.forward(call)

    def _start_decoding(self) -> None:
        self._scheduler.slots.start_decoding()
        self._release_slots()

    def _finish(self, state: RequestState) -> None:
        self._scheduler.release(state)
        self._release_slots()
        del self._live[state.request_id]

    def _release_slots(self) -> None:
        with self._executor_time:
            self._executor.release_slots(self._scheduler.slots.used)

    def _move_slot(self, source: int, destination: int, length: int) -> None:
        with self._executor_time:
            self._executor.move_slot(source, destination, length)

    def _pack(self, states: Sequence[RequestState]) -> tuple[Int64Array, Int64Array | None]:
        """Cache positions [B] where the next rows of `states` begin, and how they are sampled."""
        starts = _int64([state.cached_length for state in states])
        if not self._limits.draws:
            return starts, None
        return starts, sampling_input(self._limits, [one.request.sampling for one in states])


def _int64(values: Sequence[int]) -> Int64Array:
    """The values as an array; np.array wakes code that no other part of a step needs."""
    array = np.empty(len(values), np.int64)
    for index, value in enumerate(values):
        array[index] = value
    return array

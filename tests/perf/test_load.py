"""What the harness makes of known moments and messages: exactly what it says it measures."""

from __future__ import annotations

import asyncio
import selectors
import statistics
from collections.abc import Coroutine
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any, TypeVar

import pytest
from dflash_perf.harness import load as load_module
from dflash_perf.harness import records as records_module
from dflash_perf.harness.load import LoadGenerator
from dflash_perf.harness.load_metrics import RUN_METRICS
from dflash_perf.harness.load_prompts import PromptSet
from dflash_perf.harness.points import group
from dflash_perf.harness.records import GrownBytes, RunRecord, ServerCounts, Trace
from dflash_perf.harness.sweep_config import OfferedLoad, SweepConfig
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.perf.invented import summarize
from tests.standins.served_model import MODELS, Answer

T = TypeVar("T")
OSL = 31
TICK = 1e-9  # asyncio's clock is that coarse


class _Skipping(selectors.SelectSelector):
    """Waits for no file; the clock jumps to the next thing that is due instead."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        assert timeout is not None, "everybody waits, and nothing will ever happen"
        self.now += max(timeout, 0.0)
        return super().select(0)


class VirtualTime:
    """A clock and its event loop; `run` is asyncio's, and `perf_counter` is time's."""

    def __init__(self) -> None:
        self._selector = _Skipping()

    def perf_counter(self) -> float:
        """Seconds since its making."""
        return self._selector.now

    def process_time(self) -> float:
        """No work takes any."""
        return 0.0

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        loop = asyncio.SelectorEventLoop(self._selector)
        loop.time = self.perf_counter  # type: ignore[method-assign]
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            return runner.run(main)


class Server:
    """An endpoint whose messages come when the stub server's would be sent."""

    def __init__(self, clock: VirtualTime, model: str) -> None:
        self._clock = clock
        self._behaviour = MODELS[model]
        self.came_at: list[float] = []
        self.answers: dict[int, Answer] = {}
        self.running = self.most = 0

    async def send(self, prompt: str, seed: int, trace: Trace, schema: str | None = None) -> None:
        trace.start()
        now = self._clock.perf_counter()
        self.came_at.append(now)
        answer = self.answers[trace.index] = Answer.plan(self._behaviour, seed, OSL, now)
        self.running += 1
        self.most = max(self.most, self.running)
        for moment, (before, count) in zip(
            answer.moments, pairwise([0, *answer.tokens]), strict=True
        ):
            await asyncio.sleep(moment - self._clock.perf_counter())
            ids = bytes(4 * (count - before))
            trace.receive(self._clock.perf_counter(), b"a", ids, streaming="delta")
        self.running -= 1
        histogram = tuple(answer.histogram)
        trace.counts = ServerCounts(
            output_tokens=OSL, verify_steps=sum(histogram), drafted_tokens=1, histogram=histogram
        )

    async def describe(self) -> dict[str, Any]:
        return {}

    async def is_alive(self) -> bool:
        return True

    async def close(self) -> None:
        pass


def measure(
    monkeypatch: pytest.MonkeyPatch, model: str, load: OfferedLoad, **fields: Any
) -> tuple[RunRecord, Server]:
    """One run of `load` on `model`, in no time."""
    clock = VirtualTime()
    for module in (load_module, records_module):
        monkeypatch.setattr(module, "time", clock)
    configurations = [{"name": model, "url": "nowhere:1"}]
    known = {"configurations": configurations, "input_file": "none", "osl": OSL}
    config = SweepConfig.model_validate({**known, "concurrency": [1], **fields})
    server, prompts = Server(clock, model), PromptSet(("a", "b", "c"))
    generator = LoadGenerator(server, prompts, config, where="here", count_tokens=None)
    ended: list[int] = []
    record = clock.run(generator.run(load, 0, lambda: ended.append(1)))
    assert len(ended) == len(record.requests)
    return record, server


def test_answers_that_repeat_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's ids are all the same; OSL of them are three runs of eight."""
    record, _ = measure(monkeypatch, "steady", OfferedLoad(concurrency=1), request_count=2)
    assert [one.looping for one in record.requests] == [True, True]
    summary = summarize(record, "steady", OfferedLoad(concurrency=1), 0)
    (everything,) = summary.sets
    assert (everything.name, everything.looping, everything.values) == ("all", 2, {})
    unknown = replace(record, requests=tuple(replace(one, looping=None) for one in record.requests))
    (everything,) = summarize(unknown, "steady", OfferedLoad(concurrency=1), 0).sets
    assert everything.looping is None and everything.values["interactivity"] > 0
    (point,) = group([summary])
    assert point.notes[-1] == "2 of 2 answers repeat themselves; they inflate τ"


@pytest.mark.parametrize("streams", [1, 16, 256])
def test_a_closed_loop(monkeypatch: pytest.MonkeyPatch, streams: int) -> None:
    """Several tokens a message, jitter by request; every figure is the truth."""
    count = 3 * streams
    record, server = measure(
        monkeypatch, "timed_many", OfferedLoad(concurrency=streams), request_count=count
    )
    assert (len(record.completed), server.most, server.running) == (count, streams, 0)
    answers = [server.answers[request.index] for request in record.requests]
    ends = sorted(answer.moments[-1] for answer in answers)
    # A stream sends its next request when its last is answered.
    assert sorted(server.came_at)[streams:] == pytest.approx(ends[: count - streams], abs=TICK)
    for request, answer in zip(record.requests, answers, strict=True):
        came_at = request.sent_s
        assert request.ttft_s == pytest.approx(answer.moments[0] - came_at, abs=TICK)
        assert request.e2e_s == pytest.approx(answer.moments[-1] - came_at, abs=TICK)
        assert request.output_tokens == OSL
    figures = {tag: metric(record) for tag, metric in RUN_METRICS.items()}
    tpot = [(one.moments[-1] - one.moments[0]) / (OSL - 1) for one in answers]
    assert figures["interactivity"] == pytest.approx(1 / statistics.median(tpot))
    assert record.window_s == pytest.approx(ends[-1], abs=TICK)
    assert figures["output_throughput"] == pytest.approx(count * OSL / ends[-1])
    assert figures["acceptance_length"] == pytest.approx(30 / 8)


def test_an_open_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrivals do not wait for answers; their rate is what was asked for."""
    record, server = measure(
        monkeypatch, "steady", OfferedLoad(request_rate=50.0), request_count=400
    )
    sent = [request.sent_s for request in record.requests]
    assert sent == sorted(sent) == pytest.approx(server.came_at)
    gaps = [after - before for before, after in pairwise(sent)]
    assert statistics.mean(gaps) == pytest.approx(1 / 50, rel=0.1)
    assert statistics.stdev(gaps) == pytest.approx(1 / 50, rel=0.15)  # exponential
    lasts = server.answers[0].moments[-1] - server.came_at[0]
    assert server.most == pytest.approx(50 * lasts, rel=0.3)


def test_a_time_ends_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """No request is sent after it; those that were are answered."""
    record, server = measure(monkeypatch, "steady", OfferedLoad(concurrency=2), duration_s=10.0)
    lasts = server.answers[0].moments[-1]
    assert len(record.completed) == 2 * -(-10 // lasts) and max(server.came_at) < 10
    assert record.window_s == pytest.approx(max(server.came_at) + lasts)


PIECES = st.lists(st.binary(min_size=1, max_size=4), min_size=1, max_size=12)


@settings(deadline=None)
@given(PIECES)
def test_told_or_not_cumulative_pieces_are_their_last(pieces: list[bytes]) -> None:
    whole = b"".join(pieces)
    told, untold = GrownBytes("cumulative"), GrownBytes()
    for so_far in accumulate(pieces):
        told.push(so_far)
        untold.push(so_far)
    assert told.whole() == whole
    assert untold.whole(len(whole)) == whole
    if len(pieces) > 2:
        assert untold.whole() == whole


@settings(deadline=None)
@given(PIECES)
def test_new_pieces_are_joined(pieces: list[bytes]) -> None:
    told, untold = GrownBytes("delta"), GrownBytes()
    for piece in pieces:
        told.push(piece)
        untold.push(piece)
    whole = b"".join(pieces)
    assert told.whole() == whole
    if any(not b.startswith(a) for a, b in pairwise(pieces)):
        assert untold.whole() == whole


def test_a_last_piece_that_only_repeats() -> None:
    grown = GrownBytes()
    for piece in (b"a", b"ab", b"abc", b"abc"):
        grown.push(piece)
    assert grown.whole() == b"abc"


def _ids(count: int) -> bytes:
    return b"".join(index.to_bytes(4, "little") for index in range(count))


def test_ids_count_before_counts_before_the_tokenizer() -> None:
    trace = Trace(0, 0)
    trace.start()
    at = trace.sent_at
    for index, count in enumerate((1, 5, 9)):
        trace.receive(at + 1 + index, b"a b", _ids(count), streaming="cumulative")
    trace.counts = ServerCounts(output_tokens=9)
    record = trace.to_record(at, None)
    assert (record.output_tokens, record.token_source) == (9, "output_ids")
    assert record.ttft_s == pytest.approx(1) and record.e2e_s == pytest.approx(3)
    trace.counts = ServerCounts(output_tokens=8)
    assert trace.to_record(at, None).output_tokens == 9
    trace.ids = None
    record = trace.to_record(at, lambda text: 77)
    assert (record.output_tokens, record.token_source) == (8, "counts")
    trace.counts = ServerCounts()
    record = trace.to_record(at, lambda text: len(text.split()))
    assert record.token_source == "tokenizer" and record.output_tokens is not None
    record = trace.to_record(at, None)
    assert (record.output_tokens, record.token_source) == (None, None)


def test_messages_without_text_are_not_the_first_text() -> None:
    trace = Trace(0, 0)
    trace.start()
    trace.receive(trace.sent_at + 1, b"", _ids(1), streaming="delta")
    trace.receive(trace.sent_at + 2, b"a", _ids(1), streaming="delta")
    record = trace.to_record(trace.sent_at, None)
    assert record.ttft_s == pytest.approx(2) and record.output_tokens == 2

"""Paged requests: shared prefixes, preemption and tiny pools change no token."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dflash_trt.backends.base import SpeculationOutput, StepCall
from dflash_trt.core.limits import PagePool, WindowedPages
from dflash_trt.decoding import Generator, GeneratorOptions, Request, RequestResult, SamplingParams
from dflash_trt.decoding.page_group import PageAllocator
from tests.decoding.reference import Steps, assert_plain
from tests.decoding.schedules import MAX_SEQ_LEN, TRAINED_BLOCK, VOCAB_SIZE
from tests.inspection import allocator, held_pages, idle_pages
from tests.standins.executor import PagedFakeExecutor

SIZE = 4
COUNT = 5
keys = st.integers(0, 7).map(lambda number: bytes([number]))


class Holders(RuleBasedStateMachine):
    """Holders take, publish, share and let go at random; a plain model says what must hold."""

    def __init__(self) -> None:
        super().__init__()
        self.pages = PageAllocator(COUNT)
        self.held: list[int] = []  # one item per holder
        self.writable: set[int] = set()
        self.known: dict[bytes, int] = {}
        self.idle: list[int] = []  # oldest first

    @precondition(lambda self: len(set(self.held)) < COUNT)
    @rule()
    def take(self) -> None:
        is_empty = len(set(self.held)) + len(self.idle) == COUNT
        page = self.pages.take()
        assert page not in self.held, "a page that somebody holds"
        if is_empty:
            assert page == self.idle.pop(0), "not the one idle for longest"
            self.known = {key: one for key, one in self.known.items() if one != page}
        assert page not in self.known.values(), "a page that a key still finds"
        self.held.append(page)
        self.writable.add(page)

    @precondition(lambda self: len(set(self.held)) == COUNT)
    @rule()
    def take_from_none(self) -> None:
        with pytest.raises(ValueError, match="all 5 pages are held"):
            self.pages.take()

    @precondition(lambda self: self.writable)
    @rule(data=st.data(), key=keys)
    def publish(self, data: st.DataObject, key: bytes) -> None:
        page = data.draw(st.sampled_from(sorted(self.writable)))
        self.pages.publish(page, key)
        if key not in self.known:
            self.known[key] = page
            self.writable.discard(page)

    @rule(key=keys)
    def share(self, key: bytes) -> None:
        page = self.pages.share(key)
        assert page == self.known.get(key)
        if page is not None:
            assert page not in self.writable
            self.held.append(page)
            if page in self.idle:
                self.idle.remove(page)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        page = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.pages.release(page)
        if page not in self.held:
            self.writable.discard(page)
            if page in self.known.values():
                self.idle.append(page)

    @invariant()
    def counts(self) -> None:
        assert self.pages.held == len(set(self.held))
        assert idle_pages(self.pages) == len(self.idle)
        assert self.pages.available == COUNT - len(set(self.held))
        assert all(self.held.count(page) == 1 for page in self.writable)

    def teardown(self) -> None:
        for page in self.held:
            self.pages.release(page)
        assert (self.pages.held, self.pages.available) == (0, COUNT)


TestHolders = Holders.TestCase
TestHolders.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_pages_used_before_are_taken_before_new_ones_and_those_before_idle_ones() -> None:
    """Memory that was never touched costs nothing; a prefix is kept for as long as it can be."""
    pages = PageAllocator(4)
    with pytest.raises(ValueError, match="page 0 is not held"):
        pages.publish(0, b"a")
    first, second = pages.take(), pages.take()
    assert (first, second) == (0, 1)
    pages.publish(first, b"a")
    pages.release(second)
    pages.release(first)
    assert [pages.take() for _ in range(4)] == [1, 2, 3, 0]
    assert pages.share(b"a") is None


def make_executor(
    pages: int,
    *,
    skill: float = 0.8,
    draws: bool = False,
    kind: type[PagedFakeExecutor] | None = None,
) -> PagedFakeExecutor:
    return (kind or PagedFakeExecutor)(
        PagePool(SIZE, pages),
        max_seq_len=MAX_SEQ_LEN,
        block_size=TRAINED_BLOCK,
        vocab_size=VOCAB_SIZE,
        draft_skill=skill,
        draws=draws,
    )


def make_generator(pages: int, **options: Any) -> tuple[Generator, PagedFakeExecutor]:
    executor = make_executor(pages)
    return Generator(executor, options=GeneratorOptions(**options)), executor


def ask(*prompt: int, **arguments: Any) -> Request:
    return Request(prompt_ids=prompt, ignore_eos=True, **arguments)


def run_plainly(
    executor: PagedFakeExecutor, requests: list[Request], **options: Any
) -> list[RequestResult]:
    """Runs `requests` together; every output is the plain one."""
    generator = Generator(executor, options=GeneratorOptions(**options))
    ids = [generator.submit(request) for request in requests]
    results = Steps(generator, executor).finish()
    for request_id, request in zip(ids, requests, strict=True):
        assert_plain(results[request_id], request, executor)
    return list(results.values())


@pytest.mark.parametrize("draws", [False, True])
def test_who_looks_ahead_has_the_pages_of_two_blocks(draws: bool) -> None:
    covered: list[bool] = []

    class Watched(PagedFakeExecutor):
        def speculate(self, call: StepCall) -> SpeculationOutput:
            starts = call.starts.tolist() if call.ahead else ()
            for slot, start in enumerate(starts, start=call.first_slot):
                ahead = min(start + 2 * call.rows, self.limits.max_seq_len)
                covered.append(self.held(slot) >= ahead)
            return super().speculate(call)

    executor = make_executor(40, draws=draws, kind=Watched)
    run_plainly(executor, [ask(first, max_tokens=30) for first in range(3)])
    assert all(covered) and bool(covered) == draws


def run_counting(pages: int, requests: list[Request], *, draws: bool) -> list[tuple[int, int]]:
    """Each request's preemptions, and the step of its first token."""
    generator = Generator(make_executor(pages, draws=draws))
    ids = [generator.submit(request) for request in requests]
    first: dict[int, int] = {}
    lost: dict[int, int | None] = {}
    steps = 0
    while generator.has_work:
        steps += 1
        for event in generator.step():
            first.setdefault(event.request_id, steps)
            if event.result is not None:
                lost[event.request_id] = event.result.statistics.preemptions
    return [(lost[one] or 0, first[one]) for one in ids]


@pytest.mark.parametrize("pages", range(10, 24, 3))
def test_looking_ahead_takes_no_page_that_somebody_needs(pages: int) -> None:
    """Nobody is preempted, or admitted later, because of blocks that may come after the next."""
    requests = [ask(*range(first, first + 5), max_tokens=25) for first in (0, 4, 9, 2, 7)]
    assert run_counting(pages, requests, draws=False) == run_counting(pages, requests, draws=True)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_youngest_waits_again_when_pages_run_out(temperature: float) -> None:
    """Ten pages for three requests of up to ten each: the oldest never loses its own."""
    sampling = SamplingParams(temperature=temperature, seed=5)
    wanted = [
        ask(*range(first, first + 5), max_tokens=30, sampling=sampling) for first in (0, 4, 9)
    ]
    results = run_plainly(make_executor(10), wanted)
    assert [result.request_id for result in results] == [0, 1, 2], "in the order of their ends"
    lost = [result.statistics.preemptions or 0 for result in results]
    assert lost[0] == 0 and sum(lost) > 0
    for request, result in zip(wanted, results, strict=True):
        # Nothing is drafted or emitted twice: the counts are those of an undisturbed run.
        (alone,) = run_plainly(make_executor(10), [request])
        histogram = alone.statistics.acceptance_histogram
        assert result.statistics.acceptance_histogram == histogram


def test_a_preempted_request_recomputes_only_what_was_forgotten() -> None:
    executor = make_executor(10)
    wanted = [ask(*range(first, first + 7), max_tokens=30) for first in (0, 8)]
    _, result = run_plainly(executor, wanted, prefill_chunk=64)
    assert result.statistics.preemptions
    prefills = [call for call in executor.calls if call.kind == "target"]
    assert [call.rows for call in prefills[:2]] == [7, 7]
    assert all(call.rows < 7 + 30 for call in prefills[2:])
    # The prompt's own pages count once, at the first admission.
    assert result.statistics.cached_prompt_tokens == 0


@pytest.mark.parametrize("tail", [(), (7,), (7, 7, 7), (7, 7, 7, 7), (7,) * 9])
def test_a_prefix_costs_nothing_twice(tail: tuple[int, ...]) -> None:
    """Full pages only, and one token at least is run: its logits choose the next."""
    generator, executor = make_generator(24)
    generator.generate([ask(*range(12), max_tokens=9)])
    before = len(executor.calls)
    request = ask(*range(12), *tail, max_tokens=9)
    (result,) = generator.generate([request])
    assert_plain(result, request, executor)
    cached = result.statistics.cached_prompt_tokens
    assert cached == (12 if tail else 8)
    assert executor.calls[before].rows == len(request.prompt_ids) - cached
    (fresh,) = run_plainly(make_executor(24), [request])
    assert fresh.statistics.cached_prompt_tokens == 0
    assert result.statistics.acceptance_histogram == fresh.statistics.acceptance_histogram


@pytest.mark.parametrize(("pages", "cached"), [(4, 0), (24, 12)])
def test_a_prefix_is_shared_where_its_last_window_is_still_there(pages: int, cached: int) -> None:
    """Four pages hold one sequence's window of 3 and a block: what it has passed is soon gone."""
    pool = PagePool(SIZE, 24, (WindowedPages(3, pages),))
    executor = PagedFakeExecutor(
        pool, max_seq_len=MAX_SEQ_LEN, vocab_size=VOCAB_SIZE, block_size=8, prefill_chunk=8
    )
    generator = Generator(executor)
    generator.generate([ask(*range(12), max_tokens=30)])
    request = ask(*range(12), 7, max_tokens=9)
    generator.submit(request)
    (result,) = Steps(generator, executor).finish().values()
    assert_plain(result, request, executor)
    assert result.statistics.cached_prompt_tokens == cached


def test_the_output_of_a_request_is_the_prefix_of_the_next_turn() -> None:
    generator, executor = make_generator(24)
    (first,) = generator.generate([ask(1, 2, 3, max_tokens=18)])
    turn = ask(1, 2, 3, *first.token_ids, 5, 6, max_tokens=6)
    (second,) = generator.generate([turn])
    assert_plain(second, turn, executor)
    # 3 + 18 tokens, of which the last was never run: five full pages.
    assert second.statistics.cached_prompt_tokens == 20


def test_drafts_that_were_refused_are_never_shared() -> None:
    """A verify block that fills a page with tokens nobody chose: the page stays private."""
    generator = Generator(make_executor(24, skill=0.0))
    generator.submit(ask(*range(7), max_tokens=3))
    generator.step()  # prefill: 7 rows and the first token
    generator.step()  # a block of 8: rows 7 … 14, of which one is accepted
    assert held_pages(generator) == 4
    generator.cancel(0)
    assert idle_pages(allocator(generator)) == 2


def test_a_prompt_cancelled_halfway_leaves_what_it_has_computed() -> None:
    generator, executor = make_generator(10, prefill_chunk=5)
    doomed = generator.submit(ask(*range(13), max_tokens=4))
    generator.step()
    generator.step()
    assert generator.cancel(doomed)
    assert held_pages(generator) == 0
    generator.step()
    request = ask(*range(13), 3, max_tokens=4)
    (result,) = generator.generate([request])
    assert result.statistics.cached_prompt_tokens == 8
    assert_plain(result, request, executor)


def test_the_baseline_shares_prefixes_too() -> None:
    generator, executor = make_generator(12, speculation=False)
    for tail in (3, 4):
        request = ask(*range(9), tail, max_tokens=9)
        (result,) = generator.generate([request])
        assert_plain(result, request, executor)
    assert result.statistics.cached_prompt_tokens == 8


def test_pages_follow_the_tokens_held() -> None:
    """At most one page, and one block, ahead of the tokens of each request."""
    generator, _ = make_generator(40)
    for first in range(4):
        generator.submit(ask(first, max_tokens=30))
    held = []
    while generator.has_work:
        generator.step()
        ahead = generator.used_slots * (TRAINED_BLOCK + SIZE - 1)
        held.append(held_pages(generator))
        assert held[-1] * SIZE <= generator.cached_tokens + ahead
    assert max(held) > 8 and held[-1] == 0

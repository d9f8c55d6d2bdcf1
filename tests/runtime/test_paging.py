"""Paged requests: shared prefixes, preemption and tiny pools change no token."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_trt.backends.base import SpeculationOutput, StepCall
from dflash_trt.core.limits import PagePool
from dflash_trt.runtime import Generator, GeneratorOptions, Request, RequestResult, SamplingParams
from tests.inspection import free_pages, held_pages, idle_pages, page_tables, paged_requests
from tests.runtime.reference import decode_plainly
from tests.runtime.schedules import (
    EOS,
    MAX_SEQ_LEN,
    TRAINED_BLOCK,
    VOCAB_SIZE,
    options,
    scheduled_options,
)
from tests.standins.executor import FakeExecutor, check_step_calls
from tests.standins.paged_executor import PagedFakeExecutor

SIZE = 4
SAMPLED = SamplingParams(temperature=0.8, seed=5)


def make_executor(
    pages: int, *, max_batch: int = 4, skill: float = 0.8, draws: bool = False
) -> PagedFakeExecutor:
    return PagedFakeExecutor(
        PagePool(SIZE, pages),
        max_batch=max_batch,
        max_seq_len=MAX_SEQ_LEN,
        block_size=TRAINED_BLOCK,
        vocab_size=VOCAB_SIZE,
        draft_skill=skill,
        draws=draws,
    )


def poison_what_nobody_may_read(generator: Generator, executor: PagedFakeExecutor) -> None:
    """Every page that is neither held nor found by a key."""
    executor.poison(free_pages(generator))


def run(generator: Generator, executor: PagedFakeExecutor) -> dict[int, RequestResult]:
    """Steps until the end, poisoning after each; the streams are those of the results."""
    results: dict[int, RequestResult] = {}
    streams: dict[int, tuple[int, ...]] = {}
    while generator.has_work:
        before = len(executor.calls)
        events = generator.step()
        calls = executor.calls[before:]
        while calls and calls[0].kind == "move":  # of requests that were preempted
            calls.pop(0)
        check_step_calls(calls)
        poison_what_nobody_may_read(generator, executor)
        for event in events:
            streams[event.request_id] = streams.get(event.request_id, ()) + event.token_ids
            if event.result is not None:
                results[event.request_id] = event.result
    assert streams == {request_id: result.token_ids for request_id, result in results.items()}
    assert held_pages(generator) == 0 and not paged_requests(generator)
    return results


def assert_plain(result: RequestResult, request: Request, executor: FakeExecutor) -> None:
    tokens, reason, _ = decode_plainly(request, executor, (EOS,))
    assert (result.token_ids, result.finish_reason) == (tokens, reason)


def ask(*prompt: int, **arguments: Any) -> Request:
    return Request(prompt_ids=prompt, ignore_eos=True, **arguments)


# Prompts that begin alike, so that pages are shared, of pages, one more and one less.
prompts = st.builds(
    lambda kept, tail: ((3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3) * 2)[:kept] + tuple(tail),
    st.sampled_from([0, 3, 4, 5, 8, 12, 16, 17, 31]),
    st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=5),
)
requests = st.builds(
    Request,
    prompt_ids=prompts,
    max_tokens=st.none() | st.integers(1, 30),
    sampling=st.sampled_from([SamplingParams(), SAMPLED, SamplingParams(temperature=1.0, seed=9)]),
    ignore_eos=st.booleans(),
    speculate=st.sampled_from([True, True, False]),
    block_size=st.none() | st.integers(2, TRAINED_BLOCK),
)
actions = st.lists(
    st.one_of(requests, requests, st.just("step"), st.integers(0, 10)),
    min_size=4,
    max_size=40,
)


@given(
    actions=actions,
    options=options | scheduled_options,
    pages=st.integers(MAX_SEQ_LEN // SIZE, 24),
    max_batch=st.integers(1, 5),
    skill=st.sampled_from([0.0, 0.7, 1.0]),
    draws=st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_every_output_is_the_plain_one(
    actions: list[Request | str | int],
    options: GeneratorOptions,
    pages: int,
    max_batch: int,
    skill: float,
    draws: bool,
) -> None:
    """Submissions, steps and cancellations in any order, over pools that hold one to five."""
    executor = make_executor(pages, max_batch=max_batch, skill=skill, draws=draws)
    generator = Generator(executor, eos_token_ids=[EOS], options=options)
    submitted: dict[int, Request] = {}
    early: dict[int, RequestResult] = {}
    for action in actions:
        if isinstance(action, Request):
            submitted[generator.submit(action)] = action
        elif isinstance(action, int):
            generator.cancel(action)
        else:
            for event in generator.step():
                if event.result is not None:
                    early[event.request_id] = event.result
            poison_what_nobody_may_read(generator, executor)
    while generator.has_work:
        for event in generator.step():
            if event.result is not None:
                early[event.request_id] = event.result
        poison_what_nobody_may_read(generator, executor)
    assert early.keys() == submitted.keys()
    for request_id, request in submitted.items():
        result = early[request_id]
        tokens, reason, logits = decode_plainly(request, executor, (EOS,))
        length = len(result.token_ids)
        assert result.token_ids == tokens[:length]
        if result.finish_reason != "cancelled":
            assert (result.finish_reason, length) == (reason, len(tokens))
        if options.record_logits and length:
            assert result.logits is not None and (result.logits == logits[:length]).all()
    assert held_pages(generator) == 0 and not paged_requests(generator)


@pytest.mark.parametrize("draws", [False, True])
def test_who_looks_ahead_has_the_pages_of_two_blocks(draws: bool) -> None:
    covered: list[bool] = []

    class Watched(PagedFakeExecutor):
        def speculate(self, call: StepCall) -> SpeculationOutput:
            starts = call.starts.tolist() if call.ahead else ()
            for slot, start in enumerate(starts, start=call.first_slot):
                ahead = min(start + 2 * call.rows, self.limits.max_seq_len)
                covered.append(len(self._bound[slot]) * self._size >= ahead)
            return super().speculate(call)

    executor = Watched(PagePool(4, 40), draws=draws)
    generator = Generator(executor)
    requests = [ask(first, max_tokens=30) for first in range(3)]
    for request in requests:
        generator.submit(request)
    results = run(generator, executor)
    assert all(covered) and bool(covered) == draws
    for index, request in enumerate(requests):
        assert_plain(results[index], request, executor)


def run_counting(pages: int, requests: list[Request], *, draws: bool) -> list[tuple[int, int]]:
    """Each request's preemptions, and the step of its first token."""
    executor = make_executor(pages, draws=draws)
    generator = Generator(executor)
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
    outcomes = [run_counting(pages, requests, draws=draws) for draws in (False, True)]
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED])
def test_the_youngest_waits_again_when_pages_run_out(sampling: SamplingParams) -> None:
    """Ten pages for three requests of up to ten each: the oldest never loses its own."""
    executor = make_executor(10)
    generator = Generator(executor)
    wanted = [
        ask(*range(first, first + 5), max_tokens=30, sampling=sampling) for first in (0, 4, 9)
    ]
    for request in wanted:
        generator.submit(request)
    results = run(generator, executor)
    lost = [results[index].statistics.preemptions for index in range(3)]
    assert lost[0] == 0 and sum(lost) > 0
    assert list(results) == [0, 1, 2], "in the order in which they end"
    for index, request in enumerate(wanted):
        assert_plain(results[index], request, executor)
        # Nothing is drafted or emitted twice: the counts are those of an undisturbed run.
        alone = Generator(make_executor(10)).generate([request])[0].statistics
        assert results[index].statistics.acceptance_histogram == alone.acceptance_histogram


def test_a_preempted_request_recomputes_only_what_was_forgotten() -> None:
    executor = make_executor(10)
    generator = Generator(executor, options=GeneratorOptions(prefill_chunk=64))
    for first in (0, 8):
        generator.submit(ask(*range(first, first + 7), max_tokens=30))
    results = run(generator, executor)
    assert results[1].statistics.preemptions >= 1
    prefills = [call for call in executor.calls if call.kind == "target"]
    assert [call.rows for call in prefills[:2]] == [7, 7]
    assert all(call.rows < 7 + 30 for call in prefills[2:])
    # The prompt's own pages count once, at the first admission.
    assert results[1].statistics.cached_prompt_tokens == 0


@pytest.mark.parametrize("tail", [(), (7,), (7, 7, 7), (7, 7, 7, 7), (7,) * 9])
def test_a_prefix_costs_nothing_twice(tail: tuple[int, ...]) -> None:
    """Full pages only, and one token at least is run: its logits choose the next."""
    system = tuple(range(12))
    executor = make_executor(24)
    generator = Generator(executor)
    generator.generate([ask(*system, max_tokens=9)])
    before = len(executor.calls)
    request = ask(*system, *tail, max_tokens=9)
    (result,) = generator.generate([request])
    assert_plain(result, request, executor)
    cached = result.statistics.cached_prompt_tokens
    assert cached == (12 if tail else 8)
    assert executor.calls[before].rows == len(request.prompt_ids) - cached
    fresh = Generator(make_executor(24)).generate([request])[0].statistics
    assert fresh.cached_prompt_tokens == 0
    assert result.statistics.acceptance_histogram == fresh.acceptance_histogram


def test_the_output_of_a_request_is_the_prefix_of_the_next_turn() -> None:
    executor = make_executor(24)
    generator = Generator(executor)
    (first,) = generator.generate([ask(1, 2, 3, max_tokens=18)])
    turn = ask(1, 2, 3, *first.token_ids, 5, 6, max_tokens=6)
    (second,) = generator.generate([turn])
    assert_plain(second, turn, executor)
    # 3 + 18 tokens, of which the last was never run: five full pages.
    assert second.statistics.cached_prompt_tokens == 20


def test_drafts_that_were_refused_are_never_shared() -> None:
    """A verify block that fills a page with tokens nobody chose: the page stays private."""
    executor = make_executor(24, skill=0.0)
    generator = Generator(executor)
    generator.submit(ask(*range(7), max_tokens=3))
    generator.step()  # prefill: 7 rows and the first token
    generator.step()  # a block of 8: rows 7 … 14, of which one is accepted
    assert held_pages(generator) == 4
    generator.cancel(0)
    assert idle_pages(page_tables(generator)._allocator) == 2


def test_a_prompt_cancelled_halfway_leaves_what_it_has_computed() -> None:
    executor = make_executor(10)
    generator = Generator(executor, options=GeneratorOptions(prefill_chunk=5))
    prompt = tuple(range(13))
    doomed = generator.submit(ask(*prompt, max_tokens=4))
    generator.step()
    generator.step()
    assert generator.cancel(doomed)
    assert held_pages(generator) == 0
    generator.step()
    request = ask(*prompt, 3, max_tokens=4)
    (result,) = generator.generate([request])
    assert result.statistics.cached_prompt_tokens == 8
    assert_plain(result, request, executor)


def test_the_baseline_shares_prefixes_too() -> None:
    executor = make_executor(12)
    generator = Generator(executor, options=GeneratorOptions(speculation=False))
    for tail in (3, 4):
        request = ask(*range(9), tail, max_tokens=9)
        (result,) = generator.generate([request])
        assert_plain(result, request, executor)
    assert result.statistics.cached_prompt_tokens == 8


def test_pages_follow_the_tokens_held() -> None:
    """A page and its block per request, not the longest that each could become."""
    executor = make_executor(40, max_batch=4)
    generator = Generator(executor)
    for first in range(4):
        generator.submit(ask(first, max_tokens=30))
    held = []
    while generator.has_work:
        generator.step()
        # At most one page, and one block, ahead of the tokens of each.
        ahead = generator.used_slots * (TRAINED_BLOCK + SIZE - 1)
        assert held_pages(generator) * SIZE <= generator.cached_tokens + ahead
        held.append(held_pages(generator))
    assert max(held) > 8 and held[-1] == 0

"""Paged requests: shared prefixes, preemption and tiny pools change no token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from dflash_trt.backends.base import SpeculationOutput, StepCall
from dflash_trt.core.limits import PagePool, WindowedPages
from dflash_trt.decoding import Generator, GeneratorOptions, Request, RequestResult, SamplingParams
from tests.decoding.reference import Steps, assert_plain
from tests.decoding.schedules import MAX_SEQ_LEN, TRAINED_BLOCK, VOCAB_SIZE
from tests.inspection import allocator, held_pages, idle_pages
from tests.standins.executor import PagedFakeExecutor

SIZE = 4


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


def test_a_slot_is_emptied_before_a_sequence_has_its_pages() -> None:
    """A page that it had before may be the same, and holds another sequence's rows."""
    bound: list[int] = []

    class Watched(PagedFakeExecutor):
        def bind_pages(self, slot: int, page_ids: Sequence[int], window: int | None = None) -> None:
            bound.append(len(page_ids))
            super().bind_pages(slot, page_ids, window)

    run_plainly(make_executor(10, kind=Watched), [ask(first, max_tokens=2) for first in (1, 2)])
    assert bound[:2] == [0, 3] and bound.count(0) == 2


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

"""Plain decoding for the fake executor's model, and generators that are held to it at each step."""

from __future__ import annotations

from itertools import dropwhile

import numpy as np

from dflash_trt.backends.base import FloatArray
from dflash_trt.decoding import FinishReason, Generator, Request, RequestResult, choose_tokens
from tests.inspection import free_pages, held_pages, paged_requests
from tests.standins.executor import FakeExecutor, PagedFakeExecutor, check_step_calls, score_next


def decode_plainly(
    request: Request, executor: FakeExecutor, eos_token_ids: tuple[int, ...] = ()
) -> tuple[tuple[int, ...], FinishReason, FloatArray]:
    """Output ids, finish reason and logits [n,V], without caches, batches or drafts."""
    limits = executor.limits
    stops = set(request.stop_token_ids) | (set() if request.ignore_eos else set(eos_token_ids))
    tokens = list(request.prompt_ids)
    rows: list[FloatArray] = []
    while True:
        rows.append(row := score_next(tuple(tokens), limits.vocab_size))
        if len(tokens) < len(request.prompt_ids) + request.min_tokens:
            row = row.copy()
            row[[*stops]] = -np.inf
        position = np.array([len(tokens)], dtype=np.int64)
        tokens.append(int(choose_tokens(row[None], position, request.sampling)[0]))
        output = tuple(tokens[len(request.prompt_ids) :])
        if output[-1] in stops:
            return output, "stop", np.stack(rows)
        if len(output) == request.max_tokens or len(tokens) == limits.max_seq_len:
            return output, "length", np.stack(rows)


def assert_plain(
    result: RequestResult,
    request: Request,
    executor: FakeExecutor,
    eos_token_ids: tuple[int, ...] = (),
) -> None:
    """Tokens, finish reason and recorded logits are those of plain decoding.

    A cancelled request has the first of them.
    """
    tokens, reason, logits = decode_plainly(request, executor, eos_token_ids)
    length = len(result.token_ids)
    assert result.token_ids == tokens[:length]
    if result.finish_reason == "cancelled":
        assert length < len(tokens)
    else:
        assert (result.finish_reason, length) == (reason, len(tokens))
    assert result.statistics.output_tokens == length
    if result.logits is not None:
        np.testing.assert_array_equal(result.logits, logits[:length], strict=True)


class Steps:
    """Runs a generator step by step.

    After each, its calls must be in order, and pages that nobody may read are poisoned. A request
    ends once, with the tokens that it streamed; when all ended no page is held.
    """

    def __init__(self, generator: Generator, executor: FakeExecutor) -> None:
        self.results: dict[int, RequestResult] = {}
        self._generator, self._executor = generator, executor
        self._streams: dict[int, tuple[int, ...]] = {}
        pool = executor.limits.page_pool
        self._kinds = () if pool is None else tuple(pool.kinds)

    def step(self) -> None:
        before = len(self._executor.calls)
        events = self._generator.step()
        calls = self._executor.calls[before:]
        if isinstance(self._executor, PagedFakeExecutor):
            calls = list(dropwhile(lambda call: call.kind == "move", calls))  # after preemptions
            for window in self._kinds:
                self._executor.poison(free_pages(self._generator, window), window)
        check_step_calls(calls)
        for event in events:
            assert event.request_id not in self.results
            stream = self._streams.get(event.request_id, ()) + event.token_ids
            self._streams[event.request_id] = stream
            if event.result is not None:
                assert event.result.token_ids == stream
                self.results[event.request_id] = event.result

    def finish(self) -> dict[int, RequestResult]:
        """Steps until there is no work; every result so far, in the order in which they ended."""
        while self._generator.has_work:
            self.step()
        if isinstance(self._executor, PagedFakeExecutor):
            assert not any(held_pages(self._generator, window) for window in self._kinds)
            assert not paged_requests(self._generator)
        return self.results

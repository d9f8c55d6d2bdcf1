"""The pages of every request: admission, growth, sharing of prefixes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np

from dflash_trt.backends.base import Executor, PagedExecutor
from dflash_trt.core.limits import PagePool
from dflash_trt.runtime.pages import PageAllocator
from dflash_trt.runtime.request import RequestState

BindPages = Callable[[int, Sequence[int]], None]


@dataclass(slots=True)
class _Sequence:
    """A request's pages, in order of position.

    `keys` stand for its tokens up to the end of each full page; they outlive preemption, since
    tokens do. `published` counts the leading pages that others may share.
    """

    page_ids: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    published: int = 0


class PageTables:
    """Gives requests the pages that their next rows need.

    A page is published once all its rows are those of accepted tokens, in target and draft alike:
    another request with the same tokens up to there takes it as it is, drafter's context included.

    Args:
        pool: the executor's; used by this object alone.
        bind_pages: the executor's.
    """

    def __init__(self, pool: PagePool, bind_pages: BindPages) -> None:
        self._pool = pool
        self._bind_pages = bind_pages
        self._allocator = PageAllocator(pool.pages)
        self._sequences: dict[int, _Sequence] = {}

    @property
    def held(self) -> int:
        """Pages that requests hold; a shared one counts once."""
        return self._allocator.held

    @property
    def usage(self) -> float:
        """The share of the pool that requests hold, 0 … 1."""
        return self._allocator.held / self._pool.pages

    def admit(self, state: RequestState, slot: int, end: int) -> bool:
        """Gives `state` pages for positions up to `end`, shared ones first, and binds them.

        Shared positions count as prefilled. At least one token is left to run, since its row yields
        the next token. False, with nothing changed, if there are too few pages.
        """
        sequence = self._sequences.setdefault(state.request_id, _Sequence())
        full = (state.prefill_length - 1) // self._pool.page_size
        self._extend_keys(sequence, state, full)
        shared: list[int] = []
        for key in sequence.keys[:full]:
            page = self._allocator.share(key)
            if page is None:
                break
            shared.append(page)
        missing = self._pool.cover(end) - len(shared)
        if missing > self._allocator.available:
            self._let_go(shared)
            return False
        sequence.page_ids = [*shared, *(self._allocator.take() for _ in range(missing))]
        sequence.published = len(shared)
        state.begin_prefill(len(shared) * self._pool.page_size)
        # Of what the slot held before, nothing is left, though a page may be the same.
        self._bind_pages(slot, ())
        self._bind_pages(slot, sequence.page_ids)
        return True

    def reserve(self, state: RequestState, slot: int, end: int) -> bool:
        """Gives a running request pages up to `end`; False, with nothing changed, if too few."""
        sequence = self._sequences[state.request_id]
        missing = self._pool.cover(end) - len(sequence.page_ids)
        if missing > self._allocator.available:
            return False
        if missing > 0:
            sequence.page_ids += [self._allocator.take() for _ in range(missing)]
            self._bind_pages(slot, sequence.page_ids)
        return True

    def trim(self, state: RequestState, slot: int, end: int) -> bool:
        """Takes a running request's pages beyond `end`, which hold no row; whether it had any.

        `end` is at least the end of what it has cached.
        """
        sequence, kept = self._sequences[state.request_id], self._pool.cover(end)
        surplus = sequence.page_ids[kept:]
        if surplus:
            self._let_go(surplus)
            del sequence.page_ids[kept:]
            self._bind_pages(slot, sequence.page_ids)
        return bool(surplus)

    def publish(self, state: RequestState) -> None:
        """Lets others share the pages that `state` has filled with accepted tokens."""
        sequence = self._sequences[state.request_id]
        full = state.shareable_length // self._pool.page_size
        self._extend_keys(sequence, state, full)
        for column in range(sequence.published, full):
            self._allocator.publish(sequence.page_ids[column], sequence.keys[column])
        sequence.published = max(sequence.published, full)

    def vacate(self, state: RequestState) -> None:
        """Takes a preempted request's pages; those with the same prefix can still share them."""
        self.publish(state)
        sequence = self._sequences[state.request_id]
        self._let_go(sequence.page_ids)
        sequence.page_ids, sequence.published = [], 0

    def forget(self, state: RequestState) -> None:
        """Frees the pages of a request that ended or was cancelled, running or not."""
        sequence = self._sequences.get(state.request_id)
        if sequence is None:  # it never got to the head of the queue
            return
        if sequence.page_ids:
            self.vacate(state)
        del self._sequences[state.request_id]

    def _let_go(self, page_ids: Sequence[int]) -> None:
        # The last first: of a prefix, the end is forgotten before the beginning.
        for page in reversed(page_ids):
            self._allocator.release(page)

    def _extend_keys(self, sequence: _Sequence, state: RequestState, count: int) -> None:
        """Keys of the first `count` pages: each is a hash of the one before and its own tokens."""
        size = self._pool.page_size
        for column in range(len(sequence.keys), count):
            before = sequence.keys[-1] if column else b""
            ids = state.ids(column * size, (column + 1) * size)
            tokens = np.array(ids, np.int64).tobytes()
            sequence.keys.append(hashlib.blake2b(before + tokens, digest_size=32).digest())


def open_page_tables(executor: Executor) -> PageTables | None:
    """The page tables of an executor whose caches are paged; None for one with linear caches."""
    pool = executor.limits.page_pool
    return None if pool is None else PageTables(pool, cast(PagedExecutor, executor).bind_pages)

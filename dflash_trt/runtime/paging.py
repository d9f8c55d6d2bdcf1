"""Pages of the KV pool: who holds which one, and which hold a prefix that others can share."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np

from dflash_trt.backends.base import Executor, PagedExecutor, StatefulExecutor
from dflash_trt.core.limits import PagePool
from dflash_trt.runtime.state import RequestState
from dflash_trt.runtime.state_copies import StateCopies

BindPages = Callable[[int, Sequence[int]], None]


class PageAllocator:
    """Pages 0 … count-1, each free, held by one or more sequences, or idle.

    A held page may be published under a key that stands for every token up to its end. Whoever
    has the same tokens shares it. When its last holder lets go, it stays idle with its rows and
    its key until no page is free: then the page idle for longest is taken. Only the holder that
    took a page may write to it, until it is published.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._untouched = 0  # pages from here on were never taken: their memory costs nothing yet
        self._free: list[int] = []
        self._holders: dict[int, int] = {}
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # the first is the oldest

    @property
    def held(self) -> int:
        """Pages that sequences hold; a shared one counts once."""
        return len(self._holders)

    @property
    def available(self) -> int:
        """Pages that can be taken."""
        return self._count - self.held

    def take(self) -> int:
        """Takes a page for sole use; if none is free, the page idle for longest loses its prefix.

        Raises:
            ValueError: none is available.
        """
        if self._free:
            page = self._free.pop()
        elif self._untouched < self._count:
            page = self._untouched
            self._untouched += 1
        elif self._idle:
            page, _ = self._idle.popitem(last=False)
            del self._page_of[self._key_of.pop(page)]
        else:
            raise ValueError(f"all {self._count} pages are held")
        self._holders[page] = 1
        return page

    def share(self, key: bytes) -> int | None:
        """The page published under `key`, held once more; None where there is none."""
        page = self._page_of.get(key)
        if page is None:
            return None
        self._idle.pop(page, None)
        self._holders[page] = self._holders.get(page, 0) + 1
        return page

    def publish(self, page: int, key: bytes) -> None:
        """Lets others find a held page, now full and final; a key's first page is the one found."""
        if page not in self._holders:
            raise ValueError(f"page {page} is not held")
        if key not in self._page_of and page not in self._key_of:
            self._page_of[key] = page
            self._key_of[page] = key

    def release(self, page: int) -> None:
        """Gives a page up; after the last holder it is idle if it was published, else free."""
        self._holders[page] -= 1
        if self._holders[page]:
            return
        del self._holders[page]
        if page in self._key_of:
            self._idle[page] = None
        else:
            self._free.append(page)


@dataclass(slots=True)
class _Sequence:
    """A request's pages, in order of position.

    `keys` stand for its tokens up to the end of each full page; they outlive preemption, since
    tokens do. `published` counts the leading pages that others may share, `kept` those up to the
    last at whose end its state was kept, under `passing_key` if the next one takes its place.
    `known` counts the leading pages that others had: there prompts part.
    """

    page_ids: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    published: int = 0
    kept: int = 0
    known: int = 0
    passing_key: bytes | None = None


class PageTables:
    """Gives requests the pages that their next rows need.

    A page is published once all its rows are those of accepted tokens, in target and draft alike.
    Another request with the same tokens up to there shares it, drafter's context included. Where
    sequences have states beside pages, it shares up to the last page at whose end one was kept.

    Args:
        pool: the executor's; used by this object alone.
        bind_pages: the executor's.
        states: of sequences that have more of a prefix than its pages.
    """

    def __init__(
        self, pool: PagePool, bind_pages: BindPages, states: StateCopies | None = None
    ) -> None:
        self._pool = pool
        self._states = states
        self._bind_pages = bind_pages
        self._allocator = PageAllocator(pool.pages)
        self._sequences: dict[int, _Sequence] = {}

    @property
    def usage(self) -> float:
        """The share of the pool that requests hold, 0 … 1."""
        return self._allocator.held / self._pool.pages

    def admit(self, state: RequestState, slot: int, end: int) -> bool:
        """Gives `state` pages for positions up to `end`, shared ones first, and binds them.

        Shared positions count as prefilled. One token at least is left to run, since its row
        yields the next; all are where the prompt's log-probabilities are wanted. False, with
        nothing changed, if there are too few pages.
        """
        sequence = self._sequences.setdefault(state.request_id, _Sequence())
        full = (state.prefill_length - 1) // self._pool.page_size
        self._extend_keys(sequence, state, full)
        keys = [] if state.scores_prompt else sequence.keys[:full]
        shared, sequence.known = self._share(keys)
        missing = self._pool.cover(end) - len(shared)
        if missing > self._allocator.available:
            self._let_go(shared)
            return False
        sequence.page_ids = [*shared, *(self._allocator.take() for _ in range(missing))]
        sequence.published = sequence.kept = len(shared)
        state.begin_prefill(len(shared) * self._pool.page_size)
        # Of what the slot held before, nothing is left, though a page may be the same.
        self._bind_pages(slot, ())
        self._bind_pages(slot, sequence.page_ids)
        if self._states is not None and shared:
            self._states.restore(sequence.keys[len(shared) - 1], slot)
        return True

    def end_chunk(self, state: RequestState, end: int) -> int:
        """Where the next chunk of a prompt ends that may end at `end`.

        Where states are kept, at a page's end, if it reaches one: where other prompts part from
        it, else the last one, behind which a token is left to run.
        """
        size, start = self._pool.page_size, state.prefilled
        if self._states is not None:
            parting = self._sequences[state.request_id].known * size
            last = min(end, state.prefill_length - 1) // size * size
            for stop in (parting, last):
                if start < stop <= end:
                    return stop
        return end

    def keep_state(self, state: RequestState, slot: int) -> None:
        """Keeps the state at the end of the last page that `state` has filled, to be shared.

        Of a prompt, those where others part from it and at its end; of an output, the last one.
        """
        size = self._pool.page_size
        column = state.shareable_length // size
        sequence, end = self._sequences[state.request_id], column * size
        if self._states is None or column <= sequence.kept:
            return
        if self._states.can_keep(slot, end):
            self._extend_keys(sequence, state, column)
            key = sequence.keys[column - 1]
            is_new = self._states.keep(key, slot, instead_of=sequence.passing_key)
            # The same prompt again shares what leaves it a token to run, a longer one all of it.
            ends = (state.prefill_length - 1) // size, sequence.known
            stays = column in ends or end == state.prefill_length
            sequence.kept = column
            sequence.passing_key = key if is_new and not stays else None

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

    def _share(self, keys: Sequence[bytes]) -> tuple[list[int], int]:
        """Pages of a prefix, held once more, and how many there are: those that `keys` stand for,
        as far as they are known. Fewer are held where no state was kept at the end of all."""
        shared: list[int] = []
        for key in keys:
            page = self._allocator.share(key)
            if page is None:
                break
            shared.append(page)
        known = len(shared)
        if self._states is not None:
            kept = self._states.count_leading(keys[:known])
            self._let_go(shared[kept:])
            del shared[kept:]
        return shared, known

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
    if pool is None:
        return None
    bind_pages = cast(PagedExecutor, executor).bind_pages
    has_copies = executor.limits.state_copies > 0
    states = StateCopies(cast(StatefulExecutor, executor)) if has_copies else None
    return PageTables(pool, bind_pages, states)

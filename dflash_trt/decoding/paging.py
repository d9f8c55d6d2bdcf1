"""Pages of the KV pool: which ones requests have, and which hold a prefix that others can share."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, cast

import numpy as np

from dflash_trt.backends.base import (
    Executor,
    PagedExecutor,
    StatefulExecutor,
)
from dflash_trt.core.limits import PagePool
from dflash_trt.decoding.page_group import PageGroup
from dflash_trt.decoding.state import RequestState


class PageObserver(Protocol):
    """Hears of the pages that other requests can share, on the generator's thread.

    A key stands for all tokens up to the end of its page. Layers with a window are not told of.
    """

    def stored(self, parent: bytes | None, keys: Sequence[bytes], token_ids: Sequence[int]) -> None:
        """Pages with these keys, in order, hold `token_ids`; `parent` is the key before them."""

    def forgotten(self, key: bytes) -> None:
        """No page has that key any more."""


class StateCopies:
    """Copies of recurrent states at the ends of prompt chunks, which shared prefixes go on from.

    A key stands for all tokens up to a page's end, as a page's does. Where all copies are taken,
    the one that was used least lately gives way.
    """

    def __init__(self, executor: StatefulExecutor) -> None:
        self._executor = executor
        self._copy_of: OrderedDict[bytes, int] = OrderedDict()  # the first was used least lately

    def can_keep(self, slot: int, position: int) -> bool:
        """Whether what `slot` has is a state to go on from at `position`."""
        return self._executor.states.can_resume(slot, position)

    def keep(self, key: bytes, slot: int, instead_of: bytes | None = None) -> bool:
        """Copies what `slot` has, the state behind the tokens that `key` stands for.

        Returns whether nobody had.
        """
        copy = self._copy_of.pop(key, None)
        is_new = copy is None
        if copy is None:
            if instead_of is not None and instead_of in self._copy_of:
                copy = self._copy_of.pop(instead_of)
            elif len(self._copy_of) < self._executor.limits.state_copies:
                copy = len(self._copy_of)
            else:
                _, copy = self._copy_of.popitem(last=False)
            self._executor.states.keep(slot, copy)
        self._copy_of[key] = copy
        return is_new

    def restore(self, key: bytes, slot: int) -> None:
        """Gives `slot` the state behind the tokens that `key`, one that is kept, stands for."""
        self._copy_of.move_to_end(key)
        self._executor.states.restore(self._copy_of[key], slot)

    def count_leading(self, keys: Sequence[bytes]) -> int:
        """How many of `keys`, in order of position, there are up to the last that is kept."""
        kept = (count for count in range(len(keys), 0, -1) if keys[count - 1] in self._copy_of)
        return next(kept, 0)


@dataclass(slots=True)
class _Sequence:
    """A request's pages, in order of position: those of each group.

    `keys` stand for its tokens up to the end of each full page; they outlive preemption, since
    tokens do. `published` counts the leading pages that others may share, `kept` those up to the
    last at whose end its state was kept, under `passing_key` if the next one takes its place.
    `known` counts the leading pages that others had: there prompts part.
    """

    held: list[list[int]] = field(default_factory=list)
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

    Layers with a window may be a group of their own, which holds what rows to come see. There the
    pages of a prompt are taken chunk by chunk.

    Args:
        groups: the executor's pages, used by this object alone; of layers without a window first.
        pool: the executor's.
        chunk: rows of a prompt's chunk at most.
        states: of sequences that have more of a prefix than its pages.
    """

    def __init__(
        self,
        groups: Sequence[PageGroup],
        pool: PagePool,
        chunk: int,
        states: StateCopies | None = None,
    ) -> None:
        self._groups = tuple(groups)
        self._pool = pool
        self._chunk = chunk
        self._states = states
        self._sequences: dict[int, _Sequence] = {}
        self._observer: PageObserver | None = None

    def observe(self, observer: PageObserver) -> None:
        """Tells `observer` what can be shared from now on."""
        self._observer = observer
        self._groups[0].allocator.on_forget = observer.forgotten

    @property
    def usage(self) -> float:
        """The share of the pool that requests hold, 0 … 1: of the fullest group."""
        return max(group.usage for group in self._groups)

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
        held, sequence.known = self._share(keys)
        shared = len(held[0])
        start = shared * self._pool.page_size
        chunk_end = min(end, start + self._chunk)
        ends = [chunk_end if group.is_windowed else end for group in self._groups]
        if not self._can_take(held, ends):
            self._let_go(held)
            return False
        sequence.held, sequence.published, sequence.kept = held, shared, shared
        state.begin_prefill(start)
        for group, page_ids, own_end in zip(self._groups, held, ends, strict=True):
            group.take(page_ids, own_end)
            # Of what the slot held before, nothing is left, though a page may be the same.
            group.bind(slot, ())
            group.bind(slot, page_ids)
        if self._states is not None and shared:
            self._states.restore(sequence.keys[shared - 1], slot)
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
        column = state.cached_length // size
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
        """Gives a running request pages up to `end`; False, with none taken, if too few.

        Pages that its rows see no more are handed back.
        """
        sequence = self._sequences[state.request_id]
        changed = self._pass_by(sequence, state)
        has_room = self._can_take(sequence.held, [end] * len(self._groups))
        for index, group in enumerate(self._groups):
            held = sequence.held[index]
            if (has_room and group.take(held, end)) or index in changed:
                group.bind(slot, held)
        return has_room

    def trim(self, state: RequestState, slot: int, end: int) -> bool:
        """Takes a running request's pages beyond `end`, which hold no row; whether it had any.

        `end` is at least the end of what it has cached.
        """
        kept, had_any = self._pool.cover(end), False
        for group, held in zip(self._groups, self._sequences[state.request_id].held, strict=True):
            surplus = held[kept:]
            if surplus:
                group.let_go(surplus)
                del held[kept:]
                group.bind(slot, held)
                had_any = True
        return had_any

    def publish(self, state: RequestState) -> None:
        """Lets others share the pages that `state` has filled with accepted tokens."""
        sequence = self._sequences[state.request_id]
        full = state.cached_length // self._pool.page_size
        self._extend_keys(sequence, state, full)
        columns = range(sequence.published, full)
        if self._observer is not None:
            self._tell(self._observer, sequence, state, columns)
        for group, held in zip(self._groups, sequence.held, strict=True):
            group.publish(held, sequence.keys, columns)
        sequence.published = max(sequence.published, full)

    def vacate(self, state: RequestState) -> None:
        """Takes a preempted request's pages; those with the same prefix can still share them."""
        self.publish(state)
        sequence = self._sequences[state.request_id]
        self._let_go(sequence.held)
        sequence.held, sequence.published = [], 0

    def forget(self, state: RequestState) -> None:
        """Frees the pages of a request that ended or was cancelled, running or not."""
        sequence = self._sequences.get(state.request_id)
        if sequence is None:  # it never got to the head of the queue
            return
        if sequence.held:
            self.vacate(state)
        del self._sequences[state.request_id]

    def _tell(
        self, observer: PageObserver, sequence: _Sequence, state: RequestState, columns: range
    ) -> None:
        """Tells of the pages in `columns` that nobody can share yet: the last of them.

        Whoever has a page has the ones before it, until those are forgotten.
        """
        knows, size = self._groups[0].allocator.knows, self._pool.page_size
        keys = sequence.keys
        first = next((at for at in columns if not knows(keys[at])), columns.stop)
        if first < columns.stop:
            ids = state.ids(first * size, columns.stop * size)
            parent = keys[first - 1] if first else None
            observer.stored(parent, keys[first : columns.stop], ids)

    def _share(self, keys: Sequence[bytes]) -> tuple[list[list[int]], int]:
        """Pages of a prefix, held once more, and how many there are: those that `keys` stand for,
        as far as they are known. Fewer are held where some group lacks the last window of all, or
        no state was kept at their end."""
        everything, *windowed = self._groups
        known = count = everything.count_leading(keys)
        while True:
            longest = count
            for group in windowed:
                count = group.count_leading(keys[:count])
            if self._states is not None:
                count = self._states.count_leading(keys[:count])
            if count == longest:
                break
        shared = everything.share(keys[:known])
        everything.let_go(shared[count:])
        del shared[count:]
        return [shared, *(group.share(keys[:count]) for group in windowed)], known

    def _can_take(self, held: Sequence[Sequence[int]], ends: Sequence[int]) -> bool:
        return all(
            group.lacks(page_ids, end) <= group.allocator.available
            for group, page_ids, end in zip(self._groups, held, ends, strict=True)
        )

    def _pass_by(self, sequence: _Sequence, state: RequestState) -> list[int]:
        """Hands back what windows have passed, and lets others find it; in which groups."""
        if len(self._groups) == 1:
            return []
        self.publish(state)
        size = self._pool.page_size
        # Prefixes end where prompts part, and where one ends.
        ends = sequence.known, (state.prefill_length - 1) // size, state.prefill_length // size
        return [
            index
            for index, (group, held) in enumerate(zip(self._groups, sequence.held, strict=True))
            if group.is_windowed and group.pass_by(held, state.cached_length, ends)
        ]

    def _let_go(self, held: Sequence[Sequence[int]]) -> None:
        for group, page_ids in zip(self._groups, held, strict=True):
            group.let_go(page_ids)

    def _extend_keys(self, sequence: _Sequence, state: RequestState, count: int) -> None:
        """Keys of the first `count` pages: each is a hash of the one before and its own tokens."""
        size = self._pool.page_size
        for column in range(len(sequence.keys), count):
            before = sequence.keys[-1] if column else b""
            ids = state.ids(column * size, (column + 1) * size)
            tokens = np.array(ids, np.int64).tobytes()
            sequence.keys.append(hashlib.blake2b(before + tokens, digest_size=32).digest())


def open_page_tables(executor: Executor, chunk: int) -> PageTables | None:
    """The page tables of an executor whose caches are paged; None for one with linear caches.

    `chunk` is the most rows of a prompt's chunk.
    """
    pool = executor.limits.page_pool
    if pool is None:
        return None
    bind = cast(PagedExecutor, executor).bind_pages
    # Each group says of its own pages which slot has them.
    groups = [PageGroup(pool, partial(bind, window=one), one) for one in pool.kinds]
    has_copies = executor.limits.state_copies > 0
    states = StateCopies(cast(StatefulExecutor, executor)) if has_copies else None
    return PageTables(groups, pool, chunk, states)

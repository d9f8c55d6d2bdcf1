"""Pages of layers that see as far: which of a sequence's they need, and who holds each."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from dflash_trt.backends.page_bindings import HANDED_BACK
from dflash_trt.core.limits import PagePool

BindPages = Callable[[int, Sequence[int]], None]


class PageAllocator:
    """Pages 0 … count-1, each free, held by one or more sequences, or idle.

    A held page may be published under a key that stands for every token up to its end. Whoever
    has the same tokens shares it. When its last holder lets go, it stays idle with its rows and
    its key until no page is free: then the page idle for longest is taken. Only the holder that
    took a page may write to it, until it is published. `on_forget` is told a key that no page has
    any more.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self.on_forget: Callable[[bytes], None] | None = None
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
            key = self._key_of.pop(page)
            del self._page_of[key]
            if self.on_forget is not None:
                self.on_forget(key)
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

    def knows(self, key: bytes) -> bool:
        """Whether a page is published under `key`."""
        return key in self._page_of

    def release(self, page: int, *, soon: bool = False) -> None:
        """Gives a page up; after the last holder it is idle if it was published, else free.

        `soon`: it is as if it had been idle for longest.
        """
        self._holders[page] -= 1
        if self._holders[page]:
            return
        del self._holders[page]
        if page in self._key_of:
            self._idle[page] = None
            self._idle.move_to_end(page, last=not soon)
        else:
            self._free.append(page)


class PageGroup:
    """The pages of the layers that see `window` positions, or of those that see everything.

    A list of a sequence's pages is in order of position. Those in front of the window are handed
    back; HANDED_BACK stands there. A prefix is shared up to where all pages of its last window
    are known.

    Args:
        pool: the executor's.
        bind: tells the executor which pages a slot has.
    """

    def __init__(self, pool: PagePool, bind: BindPages, window: int | None = None) -> None:
        self._pool = pool
        self._window = window
        self.bind = bind
        self.allocator = PageAllocator(pool.kinds[window])

    @property
    def is_windowed(self) -> bool:
        return self._window is not None

    @property
    def usage(self) -> float:
        """The share of the pages that sequences hold, 0 … 1."""
        return self.allocator.held / self._pool.kinds[self._window]

    def lacks(self, held: Sequence[int], end: int) -> int:
        """Pages that `held` lacks for positions up to `end`."""
        return max(0, self._pool.cover(end) - len(held))

    def take(self, held: list[int], end: int) -> bool:
        """Adds pages for positions up to `end`, which are there; whether any were missing."""
        missing = self.lacks(held, end)
        held += [self.allocator.take() for _ in range(missing)]
        return missing > 0

    def pass_by(self, held: list[int], position: int, ends: Iterable[int]) -> bool:
        """Hands back the pages that no row from `position` on sees; whether there were any.

        Others may share a prefix of `ends` pages: what its last window needs is forgotten last.
        """
        passed = 0
        for column in reversed(range(self._first(position))):
            page = held[column]
            if page == HANDED_BACK:
                break
            is_kept = any(self._first_of(end) <= column < end for end in ends)
            self.allocator.release(page, soon=not is_kept)
            held[column] = HANDED_BACK
            passed += 1
        return passed > 0

    def publish(self, held: Sequence[int], keys: Sequence[bytes], columns: range) -> None:
        """Lets others find the pages in `columns`, those that are still held."""
        for column in columns:
            if held[column] != HANDED_BACK:
                self.allocator.publish(held[column], keys[column])

    def count_leading(self, keys: Sequence[bytes]) -> int:
        """How many of `keys` stand for a prefix that can be shared, the longest."""
        longest = run = 0
        for end, key in enumerate(keys, start=1):
            run = run + 1 if self.allocator.knows(key) else 0
            if not run and self._window is None:
                break
            if run >= end - self._first_of(end):
                longest = end
        return longest

    def share(self, keys: Sequence[bytes]) -> list[int]:
        """The pages of a prefix, which are known, held once more."""
        first = self._first_of(len(keys))
        shared = [HANDED_BACK] * first
        for key in keys[first:]:
            page = self.allocator.share(key)
            if page is None:
                break
            shared.append(page)
        return shared

    def let_go(self, page_ids: Sequence[int]) -> None:
        """Gives pages up, the last first: a prefix's end is forgotten before its beginning."""
        for page in reversed(page_ids):
            if page != HANDED_BACK:
                self.allocator.release(page)

    def _first(self, position: int) -> int:
        """The first page that a row at `position` sees."""
        return self._pool.first_seen(self._window, position)

    def _first_of(self, count: int) -> int:
        """The first page that the row behind `count` full pages sees."""
        return self._first(count * self._pool.page_size)

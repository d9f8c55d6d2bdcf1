"""Page allocation: who holds which page of the KV pool, and which pages hold a known prefix."""

from __future__ import annotations

from collections import OrderedDict


class PageAllocator:
    """Pages 0 … count-1, each free, held by one or more sequences, or idle.

    A held page may be published under a key that stands for every token up to its end. Whoever
    has the same tokens shares it; when its last holder lets go it stays idle, with its rows and
    its key, until the pool runs out: then the page idle for longest is taken. Only the one that
    took a page, and has not published it, may write to it.
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
        """Pages that a sequence holds."""
        return len(self._holders)

    @property
    def idle(self) -> int:
        """Pages that nobody holds and that a key may still find."""
        return len(self._idle)

    @property
    def available(self) -> int:
        """Pages that can be taken."""
        return self._count - len(self._holders)

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

"""The page allocator: who may write, who shares, what is forgotten first."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dflash_trt.runtime.paging import PageAllocator
from tests.inspection import idle_pages

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
    first, second = pages.take(), pages.take()
    assert (first, second) == (0, 1)
    pages.publish(first, b"a")
    pages.release(second)
    pages.release(first)
    assert [pages.take() for _ in range(4)] == [1, 2, 3, 0]
    assert pages.share(b"a") is None


def test_a_key_finds_the_first_page_published_under_it() -> None:
    pages = PageAllocator(2)
    first, second = pages.take(), pages.take()
    pages.publish(first, b"a")
    pages.publish(second, b"a")
    assert pages.share(b"a") == first
    pages.release(second)
    assert idle_pages(pages) == 0  # nobody could find it: free


def test_only_a_held_page_can_be_published() -> None:
    pages = PageAllocator(2)
    with pytest.raises(ValueError, match="page 0 is not held"):
        pages.publish(0, b"a")

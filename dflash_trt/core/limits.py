"""What a bundle was built for: its limits, and the pool of pages that its KV caches may have."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import AfterValidator, ConfigDict, Field

from dflash_trt.errors import DflashError

MAX_COUNT = 1 << 24
MAX_BLOCK = 4096
MAX_THREADS = 1024
PREFILL_CHUNK = 256
PAGE_SIZE = 64
PAGE_SIZES = tuple(1 << power for power in range(3, 11))

Count = Annotated[int, Field(ge=1, le=MAX_COUNT, strict=True)]
Threads = Annotated[int, Field(ge=1, le=MAX_THREADS)]

TOO_LONG = "not fit: the context"
"""What every error about a prompt's length says, by which clients of any port can tell it."""

_SIZES = f"a power of two from {PAGE_SIZES[0]} to {PAGE_SIZES[-1]}"


def _known_size(page_size: int) -> int:
    if page_size not in PAGE_SIZES:
        raise ValueError(f"must be {_SIZES}")
    return page_size


@dataclass(frozen=True, slots=True)
class Limits:
    """What the graphs, caches and engines of a bundle allow; a part of its manifest.

    `max_seq_len` counts cache positions per sequence; `block_size` is the largest S of a
    speculative step, anchor included; `prefill_chunk` the most rows of a pass of one sequence.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    max_batch: Count
    max_seq_len: Count
    block_size: Annotated[int, Field(ge=2, strict=True)]
    prefill_chunk: Count

    @property
    def most_rows(self) -> int:
        """Rows of the widest pass of one sequence."""
        return max(self.prefill_chunk, self.block_size)

    def window_pages(self, window: int, page_size: int) -> int:
        """Pages that a sequence holds at most of layers that see `window` positions.

        They hold the rows of the widest pass and what the first of these sees, wherever in a page
        that begins.
        """
        positions = window - 1 + self.most_rows
        return min(-(-(positions - 1) // page_size) + 1, -(-self.max_seq_len // page_size))


@dataclass(frozen=True, slots=True)
class WindowedPages:
    """`pages` of the layers that see `window` positions: there a sequence holds no more."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    window: Count
    pages: Count


@dataclass(frozen=True, slots=True)
class PagePool:
    """Paged KV caches: `pages` of `page_size` positions each, shared by all sequences.

    `windowed` layers have pages of their own, a kind for each window, the smallest first.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    page_size: Annotated[int, Field(strict=True), AfterValidator(_known_size)]
    pages: Count
    windowed: Annotated[
        tuple[WindowedPages, ...],
        Field(exclude_if=lambda kinds: not kinds),  # as in older manifests
    ] = ()

    @property
    def positions(self) -> int:
        """Positions that the whole pool holds."""
        return self.pages * self.page_size

    @property
    def windows(self) -> tuple[int, ...]:
        """The windows of `windowed`."""
        return tuple(kind.window for kind in self.windowed)

    @property
    def kinds(self) -> dict[int | None, int]:
        """Pages by the window of the layers that they are for, None for those without."""
        return {None: self.pages} | {kind.window: kind.pages for kind in self.windowed}

    def cover(self, positions: int) -> int:
        """How many pages hold `positions` positions."""
        return -(-positions // self.page_size)

    def first_seen(self, window: int | None, position: int) -> int:
        """Where in a sequence's pages, in order, a row at `position` begins to see."""
        return 0 if window is None else max(0, position - window + 1) // self.page_size


def check_positions(max_seq_len: int, longest: int, where: str | None = None) -> None:
    """Raises DflashError for more positions than the pair was trained for (usage)."""
    if max_seq_len > longest:
        trained = f"the {longest} positions that the pair was trained for"
        what = f"max_seq_len {max_seq_len} exceeds {trained}"
        fix = f"pass --max-seq-len {longest} or less"
        raise DflashError(what, where=where, fix=fix, usage=True)


def advise_shorter(max_seq_len: int, longest: int | None) -> str:
    """What helps a sequence that is too long for `max_seq_len` of `longest` trained positions."""
    if longest is not None and longest <= max_seq_len:
        return f"shorten it: the pair was trained for {longest} positions, and builds for no more"
    return "shorten it, or build with a larger --max-seq-len"


def choose_block(wanted: int | None, trained: int, where: str | None = None) -> int:
    """The block that is `wanted`, or the trained one; DflashError for a longer one (usage)."""
    if wanted is not None and wanted > trained:
        what = f"block size {wanted} exceeds the draft's longest block of {trained}"
        fix = f"pass --block-size {trained} or less"
        raise DflashError(what, where=where, fix=fix, usage=True)
    return wanted or trained


def choose_pool(
    limits: Limits,
    page_size: int = PAGE_SIZE,
    pages: int | None = None,
    windows: Iterable[int | None] = (),
) -> PagePool:
    """The pool of a bundle of `limits`; `pages` None: enough for every full sequence.

    Layers get pages of their own by their `windows` where a sequence then holds fewer: as many as
    all sequences hold, and once more a window of each, for prefixes.

    Raises:
        DflashError: pages of an odd size, or a pool that cannot hold one sequence (usage).
    """
    if page_size not in PAGE_SIZES:
        raise DflashError(f"page size {page_size} is not {_SIZES}", where="--page-size", usage=True)
    whole = -(-limits.max_seq_len // page_size)
    pages = limits.max_batch * whole if pages is None else pages
    if pages > MAX_COUNT:
        what = f"{pages:,} pages are more than {MAX_COUNT:,}"
        fix = "pass fewer, or a larger --page-size"
        raise DflashError(what, where="--kv-pages", fix=fix, usage=True)
    if pages < whole:
        raise DflashError(
            f"{pages} pages of {page_size} tokens do not hold one sequence of {limits.max_seq_len}",
            where="--kv-pages",
            fix=f"pass at least {whole}, or lower --max-seq-len",
            usage=True,
        )
    windowed = []
    for window in sorted({one for one in windows if one is not None}):
        each = limits.window_pages(window, page_size)
        if each < whole:
            kept = each + -(-window // page_size)
            windowed.append(WindowedPages(window, min(pages, limits.max_batch * kept)))
    return PagePool(page_size, pages, tuple(windowed))

"""How a bundle's KV caches are paged, checked before anything is built."""

from __future__ import annotations

from dataclasses import dataclass

from dflash_trt.bundle.manifest import Limits, PagePool
from dflash_trt.config import MAX_COUNT, PAGE_SIZE, PAGE_SIZES
from dflash_trt.errors import DflashError


@dataclass(frozen=True, slots=True)
class Paging:
    """What is asked for: positions of a page, and pages; None: enough for every full sequence."""

    page_size: int = PAGE_SIZE
    pages: int | None = None


def choose_pool(paging: Paging, limits: Limits) -> PagePool:
    """The pool that a bundle of `limits` gets.

    Raises:
        DflashError: pages of an odd size, or a pool that cannot hold one sequence (usage).
    """
    size = paging.page_size
    if size not in PAGE_SIZES:
        raise DflashError(
            f"page size {size} is not a power of two from {PAGE_SIZES[0]} to {PAGE_SIZES[-1]}",
            where="--page-size",
            usage=True,
        )
    whole = -(-limits.max_seq_len // size)
    pages = limits.max_batch * whole if paging.pages is None else paging.pages
    if pages > MAX_COUNT:
        raise DflashError(
            f"{pages:,} pages are more than {MAX_COUNT:,}",
            where="--kv-pages",
            fix="pass fewer, or a larger --page-size",
            usage=True,
        )
    if pages < whole:
        raise DflashError(
            f"{pages} pages of {size} tokens do not hold one sequence of {limits.max_seq_len}",
            where="--kv-pages",
            fix=f"pass at least {whole}, or lower --max-seq-len",
            usage=True,
        )
    return PagePool(page_size=size, pages=pages)

"""How `build` is told to lay out the KV caches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from dflash_trt.bundle.pages import Paging
from dflash_trt.config import MAX_COUNT, PAGE_SIZE, PAGE_SIZES
from dflash_trt.errors import DflashError

F = TypeVar("F", bound=Callable[..., Any])

LAYOUTS = ("linear", "paged")


def kv_layout_options(function: F) -> F:
    """--kv-layout, --page-size, --kv-pages."""
    for option in (
        click.option(
            "--kv-pages",
            type=click.IntRange(1, MAX_COUNT),
            help="Pages of the pool that all sequences share.  [default: what --max-batch "
            "sequences of --max-seq-len need]",
        ),
        click.option(
            "--page-size",
            type=int,
            help=f"Tokens of a page, a power of two from {PAGE_SIZES[0]} to {PAGE_SIZES[-1]}.  "
            f"[default: {PAGE_SIZE}]",
        ),
        click.option(
            "--kv-layout",
            type=click.Choice(LAYOUTS),
            default=LAYOUTS[0],
            show_default=True,
            help="paged: memory follows the tokens held, and requests share prefixes.",
        ),
    ):
        function = option(function)
    return function


def choose_paging(
    kv_layout: str, page_size: int | None, kv_pages: int | None, executor: str
) -> Paging | None:
    """The paging that was asked for; None for linear caches.

    Raises:
        DflashError: an option that linear caches have no use for, or an executor without pages
            (usage).
    """
    if kv_layout == "linear":
        for option, value in (("--page-size", page_size), ("--kv-pages", kv_pages)):
            if value is not None:
                raise DflashError(
                    "linear caches have no pages",
                    where=option,
                    fix="add --kv-layout paged",
                    usage=True,
                )
        return None
    if executor != "cpu":
        raise DflashError(
            f"is for executor cpu: the layout of {executor} is its own",
            where="--kv-layout",
            fix="leave it out",
            usage=True,
        )
    return Paging(PAGE_SIZE if page_size is None else page_size, kv_pages)

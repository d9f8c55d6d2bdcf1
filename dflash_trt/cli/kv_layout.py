"""How `build` is told to lay out the KV caches, and what they hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import click

from dflash_trt.backends.tensorrt.library import LIBRARIES, TENSORRT
from dflash_trt.cli.build_trtllm import TRTLLM
from dflash_trt.config import MAX_COUNT, PAGE_SIZE, PAGE_SIZES
from dflash_trt.errors import DflashError
from dflash_trt.graph.form import CacheDtype

F = TypeVar("F", bound=Callable[..., Any])

LINEAR = "linear"
LAYOUTS = (LINEAR, "paged")
CACHE_DTYPES = tuple(dtype.value for dtype in CacheDtype)


def kv_layout_options(function: F) -> F:
    """--kv-layout, --kv-dtype, --page-size, --kv-pages."""
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
            "--kv-dtype",
            type=click.Choice(CACHE_DTYPES),
            default=CACHE_DTYPES[0],
            show_default=True,
            help="What caches hold: the compute type, or E4M3 with a scale for each layer's K and "
            "V, the checkpoint's where it has them.",
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


@dataclass(frozen=True, slots=True)
class CacheChoice:
    """`page_size` is None for linear caches; `pages` None: enough for every full sequence."""

    page_size: int | None
    pages: int | None
    dtype: CacheDtype


def choose_caches(
    *,
    kv_layout: str,
    kv_dtype: str,
    page_size: int | None,
    kv_pages: int | None,
    executor: str,
    plugins: bool,
) -> CacheChoice:
    """The caches that were asked for.

    Raises:
        DflashError: an option that linear caches have no use for, or caches that the executor has
            not, or not without plugins (usage).
    """
    if kv_layout == LINEAR:
        for option, value in (("--page-size", page_size), ("--kv-pages", kv_pages)):
            if value is not None:
                raise DflashError(
                    "linear caches have no pages",
                    where=option,
                    fix="add --kv-layout paged",
                    usage=True,
                )
    dtype = CacheDtype(kv_dtype)
    if kv_layout != LINEAR:
        _check_executor(f"--kv-layout {kv_layout}", executor, plugins=plugins)
    if dtype is not CacheDtype.COMPUTE:
        _check_executor(f"--kv-dtype {kv_dtype}", executor, plugins=plugins)
    if kv_layout != LINEAR and page_size is None:
        page_size = PAGE_SIZE
    return CacheChoice(page_size, kv_pages, dtype)


def _check_executor(option: str, executor: str, *, plugins: bool) -> None:
    if executor == "cpu" or (executor == TENSORRT.executor and plugins):
        return
    if executor == TRTLLM:
        what = "TensorRT-LLM's caches are its own, always paged"
        fix = "leave it out; kv_cache_config in the deployment's YAML files is where they are set"
    elif executor == TENSORRT.executor:
        what = f"{TENSORRT.name} has such caches with this project's plugins alone"
        fix = "add --plugins"
    else:
        what = f"{LIBRARIES[executor].name} has linear caches of the compute type alone"
        fix = "leave it out, or build with --executor tensorrt --plugins"
    raise DflashError(what, where=option, fix=fix, usage=True)

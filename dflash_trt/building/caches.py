"""Which KV caches a build gets, on each kind of executor."""

from __future__ import annotations

from dataclasses import dataclass

from dflash_trt.backends.tensorrt.library import LIBRARIES, TENSORRT
from dflash_trt.building.request import CPU, TRTLLM, CacheOptions
from dflash_trt.core.limits import PAGE_SIZE
from dflash_trt.errors import DflashError, refuse_options
from dflash_trt.graph.form import CacheDtype


@dataclass(frozen=True, slots=True)
class CacheChoice:
    """`page_size` is None for linear caches; `pages` None: enough for every full sequence."""

    page_size: int | None
    pages: int | None
    dtype: CacheDtype


def choose_caches(options: CacheOptions, executor: str, *, plugins: bool) -> CacheChoice:
    """The caches that were asked for.

    Raises:
        DflashError: an option that linear caches have no use for, or caches that the executor has
            not, or not without plugins (usage).
    """
    paged = options.kv_layout == "paged"
    if not paged:
        given = {"--page-size": options.page_size, "--kv-pages": options.kv_pages}
        refuse_options(given, "linear caches have no pages", "add --kv-layout paged")
    dtype = CacheDtype(options.kv_dtype)
    if paged:
        _check_executor(f"--kv-layout {options.kv_layout}", executor, plugins=plugins)
    if dtype is not CacheDtype.COMPUTE:
        _check_executor(f"--kv-dtype {options.kv_dtype}", executor, plugins=plugins)
    size = options.page_size
    if paged and size is None:
        size = PAGE_SIZE
    return CacheChoice(size, options.kv_pages, dtype)


def _check_executor(option: str, executor: str, *, plugins: bool) -> None:
    if executor == CPU or (executor == TENSORRT.executor and plugins):
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

"""The engines of a bundle: whether they can fit a device, built, and described in its manifest."""

from __future__ import annotations

from pathlib import Path

from dflash_trt.backends.tensorrt.build.builder import (
    EngineOptions,
    build_engine,
    check_buildable,
    library_version,
)
from dflash_trt.building.quantize import QuantizationPlan
from dflash_trt.bundle.manifest import EngineSet
from dflash_trt.bundle.memory.memory import engine_memory
from dflash_trt.bundle.memory.weight_bytes import engine_weight_bytes
from dflash_trt.core.limits import Limits, PagePool
from dflash_trt.core.progress import Progress
from dflash_trt.errors import DflashError
from dflash_trt.graph.bindings import GRAPH_NAMES
from dflash_trt.graph.form import GraphForm
from dflash_trt.hardware.kernels import PLUGIN_INTERFACE, check_settled_rows
from dflash_trt.models.pair_check import Pair


def check_engines(
    pair: Pair,
    limits: Limits,
    options: EngineOptions,
    form: GraphForm,
    pool: PagePool | None = None,
    plan: QuantizationPlan | None = None,
) -> None:
    """Refuses, before anything is written, engines that cannot be built here or run anywhere.

    `form` is that of their graphs, `pool` where the caches are paged. With a `plan` the pair counts
    as it will be once it is quantised.

    Raises:
        DflashError: the library is missing, has no kernel for the pair's head sizes or needs
            another GPU, the pair exceeds the largest device of the architecture, or the block
            has more rows than the plugins can accept in one step.
    """
    algorithms = {} if plan is None else {o: one.form.algorithm for o, one in plan.options.items()}
    check_buildable(pair, options, form, algorithms)
    if options.plugins:
        check_settled_rows(limits.block_size)
    item = options.precision.item_bytes
    stored = {} if plan is None else plan.stored_bytes
    took = engine_memory(
        pair.target.sizes,
        pair.draft.sizes,
        (
            engine_weight_bytes(pair.target.weights, item, stored.get("target", {})),
            engine_weight_bytes(pair.draft.weights, item, stored.get("draft", {})),
        ),
        pair.target.vocab_size,
        limits,
        form,
        pool=pool,
    )
    largest = options.arch.largest_bytes
    if took.total > largest:
        held, shown = "linear caches", f"{limits.max_batch} × {limits.max_seq_len}"
        fix = "lower --max-batch, prefill_chunk or --max-seq-len"
        if pool is not None:
            held, shown = "paged caches", f"{pool.pages} × {pool.page_size}"
            fix = "lower --kv-pages, --max-batch or prefill_chunk"
        if took.weights > largest:
            fix = "choose a smaller pair, or several GPUs with --executor trtllm"
        states = f", {took.states:,} of recurrent states" if took.states else ""
        raise DflashError(
            f"{took.weights:,} bytes of weights, {took.caches:,} of {held} ({shown} positions)"
            f"{states} and {took.workspace:,} of workspace exceed the largest {options.arch.name} "
            f"device, {largest:,} bytes",
            fix=fix,
            usage=True,
        )


def build_engines(
    folder: Path, limits: Limits, cache_length: int, options: EngineOptions, progress: Progress
) -> EngineSet:
    """Builds the engines of the graphs in `folder`, whose caches have `cache_length` positions."""
    return EngineSet(
        arch=options.arch.name,
        library_version=library_version(options.library),
        cache_length=cache_length,
        draws=options.plugins,
        plugin_interface=PLUGIN_INTERFACE if options.plugins else None,
        files=[
            build_engine(graph, folder, options, limits, cache_length, progress)
            for graph in GRAPH_NAMES
        ],
    )

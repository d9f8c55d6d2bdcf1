"""The engines of a bundle: whether they can fit a device, built, and described in its manifest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from dflash_trt.backends.tensorrt.build.builder import (
    EngineOptions,
    build_engine,
    check_buildable,
    library_version,
)
from dflash_trt.bundle.engine_memory import split_scratch
from dflash_trt.bundle.manifest import (
    EngineFile,
    EngineSet,
    TargetDims,
    draft_dims,
    target_dims,
)
from dflash_trt.bundle.quantize import QuantizationPlan
from dflash_trt.bundle.summary import cache_bytes_per_token
from dflash_trt.checkpoints.pair import Pair
from dflash_trt.checkpoints.quantized_weights import FLOAT_DTYPES, is_packed_expert
from dflash_trt.checkpoints.safetensors_header import TensorEntry
from dflash_trt.checkpoints.target import TargetSpec
from dflash_trt.core.limits import Limits, PagePool
from dflash_trt.core.progress import Progress
from dflash_trt.errors import DflashError
from dflash_trt.graph.bindings import GRAPH_NAMES
from dflash_trt.graph.caches import stores_sinks
from dflash_trt.graph.form import GraphForm
from dflash_trt.kernels.accept import check_settled_rows

POSITION_STEP = 16


def engine_cache_length(limits: Limits, target: TargetDims, form: GraphForm) -> int:
    """M of engines of graphs of `form`, whose own cache length is not used.

    A slot of their caches holds max_seq_len positions, one more where they store the target's sinks
    (graph/caches/native.py), and as many more as keep slots aligned for TensorRT: 16 positions of 8
    narrow elements are 256 bytes, and head sizes are multiples of 8; paged ones, whole pages.
    """
    positions = limits.max_seq_len + stores_sinks(target.has_sinks, form)
    step = form.page_size or POSITION_STEP
    return -(-positions // step) * step


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
            what plugins settle in a step.
    """
    algorithms = {} if plan is None else {o: one.algorithm for o, one in plan.options.items()}
    check_buildable(pair, options, form, algorithms)
    if options.plugins:
        check_settled_rows(limits.block_size)
    item = options.precision.item_bytes
    target, draft = target_dims(pair), draft_dims(pair)
    stored = {} if plan is None else plan.stored_bytes
    weights = _engine_bytes(pair.target.weights, item, stored.get("target", {}))
    weights += _engine_bytes(pair.draft.weights, item, stored.get("draft", {}))
    capacity = engine_cache_length(limits, target, form)
    positions, held = limits.max_batch * capacity, "linear caches"
    shown = f"{limits.max_batch} × {capacity}"
    if pool is not None:
        positions, held = (pool.pages + 1) * pool.page_size, "paged caches"
        shown = f"{pool.pages} × {pool.page_size}"
    caches = positions * sum(cache_bytes_per_token(dims.sizes, form) for dims in (target, draft))
    rows = max(limits.prefill_chunk, limits.max_batch * limits.block_size)
    gathered = rows * gathered_bytes(pair.target, item)
    shares = 0
    if options.plugins:
        shares = split_scratch(target, draft, limits, form, capacity)
    largest = options.arch.largest_bytes
    if weights + caches + gathered + shares > largest:
        levers = {
            "--kv-pages": pool is not None,
            "--max-batch": pool is None or shares > 0,
            "prefill_chunk": gathered > 0,
            "--max-seq-len": pool is None,
        }
        *others, last = [name for name, helps in levers.items() if helps]
        fix = f"lower {', '.join(others)} or {last}" if others else f"lower {last}"
        if weights > largest:
            fix = "choose a smaller pair, or several GPUs with --executor trtllm"
        experts = f" and {gathered:,} of experts gathered for {rows} rows" if gathered else ""
        split = f" and {shares:,} of attention's shares" if shares else ""
        raise DflashError(
            f"{weights:,} bytes of weights and {caches:,} of {held} ({shown} positions){experts}"
            f"{split} exceed the largest {options.arch.name} device, {largest:,} bytes",
            fix=fix,
            usage=True,
        )


def gathered_bytes(target: TargetSpec, item: int) -> int:
    """Bytes of expert weights that one row gathers in one layer of an engine; 0 without experts."""
    moe = target.moe
    return 0 if moe is None else 3 * moe.chosen * moe.intermediate_size * target.hidden_size * item


def _engine_bytes(weights: Mapping[str, TensorEntry], item: int, planned: Mapping[str, int]) -> int:
    """Bytes of weights in an engine that computes in items of that size.

    `planned` has the bytes of those that are going to be quantised.
    """
    sizes = {
        role: entry.num_elements * (item if entry.dtype in FLOAT_DTYPES else 1)
        for role, entry in weights.items()
    }
    # Casts are folded: the bytes of MXFP4 experts become the int32 that they are looked up by.
    packed = {role: 4 * size for role, size in sizes.items() if is_packed_expert(role)}
    return sum(planned.get(role, size) for role, size in (sizes | packed).items())


def build_engines(
    folder: Path, limits: Limits, cache_length: int, options: EngineOptions, progress: Progress
) -> EngineSet:
    """Builds the engines of the graphs in `folder`, whose caches have `cache_length` positions."""
    built = [
        build_engine(graph, folder, options, limits, cache_length, progress)
        for graph in GRAPH_NAMES
    ]
    return EngineSet(
        arch=options.arch.name,
        library_version=library_version(options.library),
        cache_length=cache_length,
        draws=options.plugins,
        files=[
            EngineFile(
                graph=engine.graph,
                path=engine.path,
                summary=engine.summary_path,
                layers=sum(engine.summary.layers.values()),
                fused_attentions=len(engine.summary.attentions),
                cache_updates=len(engine.summary.cache_updates),
                quantized_products=dict(Counter(engine.summary.quantized_products.values())),
                operations=engine.operations,
            )
            for engine in built
        ],
    )

"""Turns a pair of checkpoints into a bundle."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from dflash_trt.backends.tensorrt.build.builder import EngineOptions, library_version
from dflash_trt.building.engines import build_engines, check_engines
from dflash_trt.building.quantize import QuantizationPlan, quantize_pair
from dflash_trt.building.spec import BuildSpec
from dflash_trt.bundle.dims import draft_dims, target_dims
from dflash_trt.bundle.graph_folder import GraphFolder
from dflash_trt.bundle.manifest import (
    MANIFEST_NAME,
    PROMPTS_NAME,
    SCHEMA_VERSION,
    TOKENIZER_FOLDER,
    BundleFile,
    EngineSet,
    ExecutorName,
    Manifest,
    Origin,
)
from dflash_trt.bundle.memory.cache_bytes import engine_cache_length
from dflash_trt.bundle.support import PairFeature, check_pair_features
from dflash_trt.core.files import FileKind, blob_sha256, copy_small, exists, file_sha256
from dflash_trt.core.limits import Limits, check_positions, choose_block, choose_pool
from dflash_trt.core.progress import Progress
from dflash_trt.core.publish import staged_folder
from dflash_trt.errors import DflashError, printable
from dflash_trt.graph.bindings import Owner
from dflash_trt.graph.draft import build_draft
from dflash_trt.graph.form import CacheDtype, GraphForm, Precision
from dflash_trt.graph.quantized import stack_products
from dflash_trt.graph.rope_tables import HEAD_ROWS, compute_tables, draft_head
from dflash_trt.graph.target import build_target
from dflash_trt.hardware.kernels import check_settled_rows
from dflash_trt.models.build_config import BuildConfig
from dflash_trt.models.pair_check import Pair
from dflash_trt.models.quantized_weights import read_kv_scales
from dflash_trt.models.safetensors_header import TensorEntry, header_sha256
from dflash_trt.quantization.int8 import Int8Selection, has_int8, select_int8
from dflash_trt.text.tokenizer import OLDER_FILES, TEMPLATE_FILES, BundleTokenizer
from dflash_trt.version import __version__

MAX_TABLE_BYTES = 1 << 30
TOKENIZER_NAME = "tokenizer.json"
TOKENIZER_FILES = {
    TOKENIZER_NAME: FileKind.TOKENIZER,
    "tokenizer_config.json": FileKind.CONFIG,
    **dict.fromkeys(OLDER_FILES, FileKind.CONFIG),
    "generation_config.json": FileKind.CONFIG,
    **dict.fromkeys(TEMPLATE_FILES, FileKind.TEMPLATE),
}
LIBRARIES = ("numpy", "onnx", "onnxruntime", "safetensors", "tokenizers")


def build_bundle(
    pair: Pair,
    config: BuildConfig,
    name: str,
    destination: Path,
    spec: BuildSpec,
    progress: Progress,
    *,
    engines: EngineOptions | None = None,
    torch: Precision | None = None,
    plan: QuantizationPlan | None = None,
    prompts: Path | None = None,
    int8: Collection[Owner] = (),
) -> Manifest:
    """Writes a bundle of `pair` to `destination`, whole or not at all.

    Weights are referenced, never loaded: memory stays at the size of the graphs and the RoPE
    tables, unless engines are built or activations observed.

    Args:
        config: with the limits and precisions of `spec`, whose other options count.
        engines: to build; None makes a bundle whose graphs run themselves.
        torch: what PyTorch computes these graphs in; None for the CPU's executor.
        plan: what is quantised of `pair`; None builds the checkpoints as they are.
        prompts: a .jsonl to carry along, which `verify` uses when given no others.
        int8: the models whose products are computed in eight bits.

    Raises:
        DflashError: limits do not fit the pair, it cannot be quantised, an engine cannot be built,
            or a file cannot be read or written.
    """
    fp8, page_size = spec.cache_dtype is CacheDtype.FP8, spec.page_size
    is_native = engines is not None or torch not in (None, Precision.FLOAT32)
    kernels = is_native and (fp8 or page_size is not None)
    wanted = {PairFeature.ENGINES: is_native, PairFeature.KERNEL_CACHES: kernels}
    wanted[PairFeature.FP8_CACHES] = fp8
    check_pair_features(pair, [feature for feature, is_wanted in wanted.items() if is_wanted])
    limits = _limits(pair, config)
    end_ids = _find_end_ids(pair)
    if fp8:  # reads the scales that the graphs will hold: later is after a pair is quantised
        for one in (pair.target, pair.draft):
            for layer in range(one.num_layers):
                read_kv_scales(one.checkpoint.tensors, one.weights, one.quantization, layer)
    pool = None
    if page_size is not None:
        windows = (*pair.target.sizes.windows, *pair.draft.sizes.windows)
        pool = choose_pool(limits, page_size, spec.caches.kv_pages, windows)
    form = GraphForm(
        page_size=None if pool is None else pool.page_size,
        windows=() if pool is None else pool.windows,
        cache_dtype=spec.cache_dtype,
        replay=limits.block_size if pair.target.sizes.has_state else None,
    )
    narrow: dict[Owner, Int8Selection] = {
        owner: select_int8(pair.target if owner == "target" else pair.draft) for owner in int8
    }
    libraries = {library: version(library) for library in LIBRARIES}
    if engines is not None:
        form = engines.form(form)
        check_engines(pair, limits, engines, form, pool, plan)
        libraries[engines.library.module] = library_version(engines.library)
    if torch is not None:
        form = replace(form, precision=torch, draws=True)
        check_settled_rows(limits.block_size)
        libraries["torch"] = version("torch")
    if engines is not None or torch is not None:
        length = engine_cache_length(limits, pair.target.sizes, form)
        form = replace(form, cache_length=length).with_pages(pool)
    built: EngineSet | None = None
    executor: ExecutorName = "cpu" if torch is None else "torch"
    with staged_folder(destination, overwrite=spec.overwrite) as folder:
        # Beside the bundle in its temporary folder: on its filesystem, and gone when that goes.
        written = folder.with_name("quantized")
        if plan is not None:
            pair = quantize_pair(plan, written, destination, progress)
        graphs = GraphFolder(folder)
        graphs.place_weights(
            {"target": pair.target.weights, "draft": pair.draft.weights},
            destination,
            progress,
            copy=spec.copy_weights,
            written=written,
        )
        graphs.describe_weights("target", pair.target.checkpoint)
        graphs.describe_weights("draft", pair.draft.checkpoint)
        tables = graphs.write_tables(
            compute_tables(pair.target, pair.draft, limits.max_seq_len) | draft_head(pair)
        )
        if narrow:
            tables |= graphs.write_int8(_int8_matrices(narrow, tables), progress)
        progress.stage("graphs", None)
        _write_graphs(pair, graphs, tables, form)
        has_tokenizer = _copy_tokenizer(pair, folder)
        if prompts is not None:
            copy_small(prompts, folder / PROMPTS_NAME, FileKind.PROMPTS, named=True)
        if engines is not None:
            built = build_engines(folder, limits, length, engines, progress)
            executor = engines.library.executor
        origin: Origin = "quantized"
        if plan is None:
            origin = "copied" if graphs.has_copies else "linked"
        manifest = Manifest(
            schema_version=SCHEMA_VERSION,
            name=printable(name),
            created_by=f"dflash-trt {__version__}",
            executor=executor,
            compute_dtype=form.precision.value,
            target=target_dims(pair, end_ids, narrow.get("target")),
            draft=draft_dims(pair, narrow.get("draft")),
            limits=limits,
            weights=origin,
            tokenizer=has_tokenizer,
            libraries=libraries,
            files=_describe_files(graphs, spec, progress),
            engines=built,
            page_pool=pool,
            kv_dtype=spec.cache_dtype.value,
        )
        (folder / MANIFEST_NAME).write_bytes(manifest.encode())
    return manifest


def _limits(pair: Pair, config: BuildConfig) -> Limits:
    """The bundle's limits; DflashError (usage) where the models were not made for them."""
    longest = pair.target.max_position_embeddings  # past the draft's there are no drafts
    check_positions(config.max_seq_len, longest)
    target, draft = pair.target.sizes, pair.draft.sizes
    sizes = [target.full_layer.head_dim, draft.layer.head_dim]
    if pair.target.local_rope is not None:
        sizes.append(target.layer.head_dim)
    tables = sum(2 * 4 * config.max_seq_len * head_dim for head_dim in sizes)
    if tables > MAX_TABLE_BYTES:  # they are computed in memory
        raise DflashError(
            f"RoPE tables for {config.max_seq_len:,} positions take {tables:,} bytes",
            fix="lower --max-seq-len",
            usage=True,
        )
    block_size = choose_block(config.block_size, pair.draft.block_size)
    if block_size >= config.max_seq_len:
        raise DflashError(
            f"max_seq_len {config.max_seq_len} does not hold one block of {block_size} rows",
            fix="raise --max-seq-len"
            if config.max_seq_len < longest
            else f"pass --block-size {longest - 1} or less: longer sequences are not trained",
            usage=True,
        )
    return Limits(
        max_batch=config.max_batch,
        max_seq_len=config.max_seq_len,
        block_size=block_size,
        prefill_chunk=min(config.prefill_chunk, config.max_seq_len),
    )


def _int8_matrices(
    narrow: Mapping[Owner, Int8Selection], tables: Mapping[str, TensorEntry]
) -> dict[str, TensorEntry]:
    """The matrices that get eight-bit copies, by what graphs call them."""
    matrices = {
        f"{owner}/{role}": entry
        for owner, selection in narrow.items()
        for role, entry in selection.matrices.items()
    }
    rows = tables.get(HEAD_ROWS)  # of the target's head
    if rows is not None and "target" in narrow and has_int8(rows):
        matrices[HEAD_ROWS] = rows
    return matrices


def _write_graphs(
    pair: Pair, graphs: GraphFolder, tables: Mapping[str, TensorEntry], form: GraphForm
) -> None:
    target, draft = pair.target, pair.draft
    for model in (
        build_target(target, draft, tables, graphs.locate, form),
        build_draft(pair, tables, graphs.locate, form),
        build_target(target, None, tables, graphs.locate, form),
    ):
        stack_products(model)
        graphs.write_graph(model)


def _find_end_ids(pair: Pair) -> tuple[int, ...]:
    """The ids that end a text, the tokenizer's own included.

    Opens the checkpoint's tokenizer, if it has one: later would be after a long build.
    """
    target, folder = pair.target, pair.target.checkpoint.path
    if not exists(folder / TOKENIZER_NAME):
        return target.eos_token_ids
    tokenizer = BundleTokenizer(folder)
    entries = tokenizer.core.get_vocab_size()
    if entries > target.vocab_size:
        raise DflashError(
            f"has {entries} entries, the target's vocabulary {target.vocab_size}",
            where=folder / TOKENIZER_NAME,
            fix="it belongs to another model",
        )
    return tokenizer.end_ids(target.eos_token_ids)


def _copy_tokenizer(pair: Pair, folder: Path) -> bool:
    """Copies what text needs; False where the checkpoint has no tokenizer.json."""
    source = pair.target.checkpoint.path
    if not exists(source / TOKENIZER_NAME):
        return False
    for name, kind in TOKENIZER_FILES.items():
        if exists(source / name):
            copy = folder / TOKENIZER_FOLDER / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy_small(source / name, copy, kind)
    return True


def _describe_files(graphs: GraphFolder, spec: BuildSpec, progress: Progress) -> list[BundleFile]:
    """Sizes and hashes of everything in the folder."""
    folder = graphs.folder
    described: list[BundleFile] = []
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    if spec.hash_weights:
        progress.stage("hashing weights", sum(path.stat().st_size for path in paths))
    for path in paths:
        name = path.relative_to(folder).as_posix()
        source = graphs.weights.get(name)
        content: str | None
        if source is None or spec.hash_weights:
            content = file_sha256(path, progress.advance if spec.hash_weights else None)
        else:
            content = blob_sha256(source)
        described.append(
            BundleFile(
                path=name,
                bytes=path.stat().st_size,
                sha256=content,
                header_sha256=None if source is None else header_sha256(path),
            )
        )
    return described

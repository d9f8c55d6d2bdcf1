"""The part of the check that builds one pair's engines with one library, runs and probes them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np

from dflash_trt.backends.base import Int64Array
from dflash_trt.backends.onnxruntime.executor import OnnxRuntimeExecutor
from dflash_trt.backends.registry import open_executor
from dflash_trt.backends.tensorrt.build.builder import EngineOptions
from dflash_trt.backends.tensorrt.build.plugins import plugin_arch
from dflash_trt.backends.tensorrt.library import Library, RefusedError, load_library
from dflash_trt.backends.tensorrt.run.engines import Loader
from dflash_trt.backends.tensorrt.run.executor import TensorRtExecutor
from dflash_trt.building.bundle_writer import BuildOptions, build_bundle
from dflash_trt.bundle.bundle import Bundle, load_tokenizer, open_bundle
from dflash_trt.core.progress import SilentProgress
from dflash_trt.decoding import Request
from dflash_trt.errors import DflashError
from dflash_trt.graph.form import Precision
from dflash_trt.hardware.device import Device
from dflash_trt.hardware.gpus import Arch, arches
from dflash_trt.models.build_config import load_config, resolve_file
from dflash_trt.models.draft import read_draft
from dflash_trt.models.pair_check import Pair, check_pair
from dflash_trt.models.target import read_target
from dflash_trt.proof.gpu_check.cache_probes import IN_PLACE, probe_dirty_pages, probe_rows
from dflash_trt.proof.gpu_check.calls import Bench
from dflash_trt.proof.gpu_check.executor_probes import (
    probe_ahead,
    probe_candidates,
    probe_drawing,
    probe_graphs,
    probe_lengths,
    probe_move,
    probe_speed,
    probe_tokens,
)
from dflash_trt.proof.gpu_check.gpu_record import (
    Found,
    PartSkippedError,
    Probe,
    attempt,
    describe_error,
)
from dflash_trt.proof.gpu_check.random_pairs import (
    PAGE_SIZE,
    RandomPair,
    configure,
    write_random_pair,
)
from dflash_trt.proof.gpu_check.runner import Setting
from dflash_trt.proof.gpu_check.shape_probes import probe_calls, probe_drafts, probe_drift
from dflash_trt.text.prompts import read_prompts

DEMO = "demo"
PRECISION = Precision.BFLOAT16
PROMPTS, MAX_TOKENS = 4, 64
PROMPT_LENGTHS, RANDOM_TOKENS = (90, 5, 40, 70), 24

BUILDS, LOADS = "engines build", "engines load as their manifest says"
REOPENS = "engines open again with what was kept of the first time"


def check_engines(
    library: Library,
    shape: RandomPair | None,
    setting: Setting,
    *,
    plugins: bool,
    counts_memory: bool = False,
) -> Iterator[Probe]:
    """Probes of the demo pair's engines (`shape` None), or of a random pair's.

    Raises:
        PartSkippedError: the library is not here, or has nothing for this GPU.
    """
    arch = _find_arch(library, plugins=plugins)
    options = EngineOptions(arch, PRECISION, library, plugins=plugins)
    folder = setting.folder
    pair = _read_demo() if shape is None else write_random_pair(shape, folder)
    cpu_bundle = _build(shape, pair, folder / "cpu", None)
    yield from attempt(
        "a file that is no engine is refused, with a reason",
        _probe_refusal,
        library,
        folder / "no.engine",
    )
    started = time.perf_counter()
    try:
        bundle = _build(shape, pair, folder / "gpu", options)
    except Exception as error:  # a library's own, too
        yield Probe(BUILDS, False, describe_error(error))
        return
    yield from _describe_build(bundle, options, time.perf_counter() - started)
    requests = _make_requests(shape, cpu_bundle)

    def probe_bundles() -> Iterator[Probe]:
        with closing(open_executor(cpu_bundle)) as cpu, closing(open_executor(bundle)) as gpu:
            assert isinstance(gpu, TensorRtExecutor) and isinstance(cpu, OnnxRuntimeExecutor)
            gpu.preload(("target", "draft", "target_only"))
            yield Probe(LOADS, True, "names, types, shapes and aliases are as built")
            bench = Bench(gpu, cpu, bundle.manifest, requests, _make_prompt(gpu, requests[0]))
            probes = _choose(gpu, counts_memory=counts_memory, with_speed=shape is None)
            for name, find in probes.items():
                yield from attempt(name, find, bench)

    yield from attempt(LOADS, probe_bundles)
    yield from attempt(REOPENS, _probe_reopening, bundle)


def _choose(
    gpu: TensorRtExecutor, *, counts_memory: bool, with_speed: bool
) -> dict[str, Callable[[Bench], Found | Iterator[Probe]]]:
    """The probes that suit the engines, each after those it depends on."""
    probes: dict[str, Callable[[Bench], Found | Iterator[Probe]]] = {IN_PLACE: probe_rows}
    if gpu.limits.page_pool is not None:
        probes["what an earlier owner left in a page is not seen"] = probe_dirty_pages
    probes["calls of changing shape give the CPU's logits"] = probe_calls
    probes["drafts are mostly the CPU's"] = probe_drafts
    if counts_memory:
        probes["changes of shape keep no memory"] = probe_drift
    probes |= {
        "tokens are the CPU's": probe_tokens,
        "causality counts from each row's own length": probe_lengths,
        "CUDA graphs replay the step": probe_graphs,
        "slots move": probe_move,
    }
    if gpu.limits.draws:
        probes |= {
            "engines draw what the runtime would": lambda one: probe_drawing(one.gpu, one.prompt),
            "looking ahead changes no token": lambda one: probe_ahead(one.gpu, one.prompt),
        }
    else:
        probes["candidates draw what whole rows draw"] = probe_candidates
    if with_speed:
        probes["speed at batch 1"] = probe_speed
    return probes


def _describe_build(bundle: Bundle, options: EngineOptions, seconds: float) -> Iterator[Probe]:
    version = str(load_library(options.library).__version__)
    detail = f"{options.library.name} {version}, {seconds:.1f} s"
    yield Probe(BUILDS, True, detail, {"seconds": seconds, "version": version})
    assert bundle.manifest.engines is not None
    if options.plugins:
        files = [bundle.folder / one.summary for one in bundle.manifest.engines.files]
        codes = {json.loads(file.read_bytes())["kernel_code"] for file in files}
        yield Probe(
            "TensorRT takes kernels as machine code",
            codes == {"cubin"},
            f"built from {', '.join(sorted(codes))}",
        )


def _find_arch(library: Library, *, plugins: bool) -> Arch:
    """The architecture of the GPU that is here, as `library` is to build for it.

    Raises:
        PartSkippedError: the library is missing or has no such GPU, or there are no kernels for it.
    """
    try:
        load_library(library)
    except DflashError as error:
        raise PartSkippedError(error.message) from error
    with closing(Device()) as device:
        arch = arches().get(device.arch)
        if arch is None:
            arch = Arch(
                name=device.arch,
                devices=device.name,
                largest_bytes=device.total_bytes,
                tensorrt_rtx="CURRENT",
            )
    if library.is_rtx and arch.tensorrt_rtx is None:
        raise PartSkippedError(f"{library.name} has no {arch.name}")
    if plugins:
        try:
            plugin_arch(arch.name)
        except DflashError as error:
            raise PartSkippedError(error.what) from error
    return arch


def _read_demo() -> Pair:
    config, path = load_config(DEMO)
    sources = config.target.checkpoint, config.draft.checkpoint
    target, draft = (resolve_file(source, path) for source in sources)
    return check_pair(read_target(target), read_draft(draft))


def _build(
    shape: RandomPair | None, pair: Pair, folder: Path, engines: EngineOptions | None
) -> Bundle:
    """Engines, or graphs for the CPU with the same numbers.

    The CPU's caches are linear, whose bits are those of paged ones: they hold every position.
    """
    if shape is None:
        config, path = load_config(DEMO)
        name, options = path.stem, BuildOptions(engines=engines)
    else:
        config, name = configure(shape), "random"
        page_size = PAGE_SIZE if shape.is_paged and engines is not None else None
        options = BuildOptions(engines=engines, page_size=page_size, cache_dtype=shape.cache_dtype)
    build_bundle(pair, config, name, folder, options, SilentProgress())
    return open_bundle(folder)


def _make_requests(shape: RandomPair | None, bundle: Bundle) -> list[Request]:
    """What a pair is asked: the demo's own prompts, or random ones."""
    if shape is not None:
        generator, vocab_size = np.random.default_rng(0), bundle.manifest.target.vocab_size
        prompts = [generator.integers(0, vocab_size, one).tolist() for one in PROMPT_LENGTHS]
        return [Request(prompt_ids=tuple(ids), max_tokens=RANDOM_TOKENS) for ids in prompts]
    config, path = load_config(DEMO)
    assert config.prompts is not None
    texts = read_prompts(resolve_file(config.prompts, path))[:PROMPTS]
    tokenizer = load_tokenizer(bundle)
    prompts = [tokenizer.encode(text) for text in texts]
    return [Request(prompt_ids=tuple(ids), max_tokens=MAX_TOKENS) for ids in prompts]


def _make_prompt(gpu: TensorRtExecutor, request: Request) -> Int64Array:
    """[1,S] of a request's tokens, repeated where it is short."""
    limits, length = gpu.limits, len(request.prompt_ids)
    most = min(limits.prefill_chunk, limits.max_seq_len - limits.block_size)
    rows = min(max(length, 3 * limits.block_size), most)
    return np.resize(np.array(request.prompt_ids, np.int64), (1, rows))


def _probe_refusal(library: Library, path: Path) -> Found:
    path.write_bytes(b"this is no engine" * 64)
    try:
        Loader(library, load_library(library), None).load(path)
    except DflashError as error:
        has_cause = not isinstance(error, RefusedError) or error.cause is not None
        return has_cause, error.message
    return False, "it was taken for an engine"


def _probe_reopening(bundle: Bundle) -> Found:
    started = time.perf_counter()
    with closing(open_executor(bundle, graphs=("target", "draft"))) as executor:
        assert isinstance(executor, TensorRtExecutor)
    seconds = time.perf_counter() - started
    return True, f"in {seconds:.1f} s", {"seconds": seconds}

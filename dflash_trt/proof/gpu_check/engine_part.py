"""The part of the check that builds one pair's engines with one library, runs and probes them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np

from dflash_trt.backends.onnxruntime.executor import OnnxRuntimeExecutor
from dflash_trt.backends.registry import open_executor
from dflash_trt.backends.tensorrt.build.builder import EngineOptions
from dflash_trt.backends.tensorrt.build.plugins import plugin_arch
from dflash_trt.backends.tensorrt.library import Library, RefusedError, load_library
from dflash_trt.backends.tensorrt.run.engines import Loader
from dflash_trt.backends.tensorrt.run.executor import TensorRtExecutor
from dflash_trt.bundle.build import BuildOptions, build_bundle
from dflash_trt.bundle.bundle import Bundle, load_tokenizer, open_bundle
from dflash_trt.checkpoints.draft import read_draft
from dflash_trt.checkpoints.pair import Pair, check_pair
from dflash_trt.checkpoints.target import read_target
from dflash_trt.config import load_config, resolve_file
from dflash_trt.core.progress import SilentProgress
from dflash_trt.errors import DflashError
from dflash_trt.graph.form import Precision
from dflash_trt.hardware.device import Device
from dflash_trt.hardware.gpus import Arch, arches
from dflash_trt.proof.gpu_check.cache_probes import run_cache_probes
from dflash_trt.proof.gpu_check.executor_probes import run_probes
from dflash_trt.proof.gpu_check.random_pairs import (
    RandomPair,
    build_random_pair,
    write_random_pair,
)
from dflash_trt.proof.gpu_check.record import PartSkippedError, Probe, attempt, describe_error
from dflash_trt.proof.gpu_check.runner import Setting
from dflash_trt.proof.gpu_check.shape_probes import run_shape_probes
from dflash_trt.runtime import Request
from dflash_trt.text.prompts import read_prompts

DEMO = "demo"
PRECISION = Precision.BFLOAT16
PROMPTS, MAX_TOKENS = 4, 64
PROMPT_LENGTHS, RANDOM_TOKENS = (90, 5, 40, 70), 24

BUILDS = "engines build"
MACHINE_CODE = "TensorRT takes kernels as machine code"
LOADS = "engines load as their manifest says"
REFUSES = "a file that is no engine is refused, with a reason"
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
    options = EngineOptions(
        find_arch(library, plugins=plugins), PRECISION, library, plugins=plugins
    )
    folder = setting.folder
    pair, requests = _write_pair(shape, folder)
    cpu_bundle = _build(shape, pair, folder / "cpu", None)
    yield from attempt(REFUSES, partial(_probe_refusal, library, folder / "no.engine"))

    started = time.perf_counter()
    try:
        bundle = _build(shape, pair, folder / "gpu", options)
    except Exception as error:  # a library's own, too
        yield Probe(BUILDS, False, describe_error(error))
        return
    yield from _describe_build(bundle, options, time.perf_counter() - started)
    probes = partial(
        _probe_bundles,
        bundle,
        cpu_bundle,
        requests,
        with_speed=shape is None,
        counts_memory=counts_memory,
    )
    yield from attempt(LOADS, probes)
    yield from attempt(REOPENS, partial(_probe_reopening, bundle))


def _describe_build(bundle: Bundle, options: EngineOptions, seconds: float) -> Iterator[Probe]:
    version = str(load_library(options.library).__version__)
    detail = f"{options.library.name} {version}, {seconds:.1f} s"
    yield Probe(BUILDS, True, detail, {"seconds": seconds, "version": version})
    assert bundle.manifest.engines is not None
    if options.plugins:
        files = [bundle.folder / one.summary for one in bundle.manifest.engines.files]
        codes = {json.loads(file.read_bytes())["kernel_code"] for file in files}
        yield Probe(MACHINE_CODE, codes == {"cubin"}, f"built from {', '.join(sorted(codes))}")


def find_arch(library: Library, *, plugins: bool) -> Arch:
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


def _write_pair(shape: RandomPair | None, folder: Path) -> tuple[Pair, list[Request]]:
    """The pair, and what it is asked."""
    if shape is not None:
        pair, generator = write_random_pair(shape, folder), np.random.default_rng(0)
        prompts = [
            tuple(generator.integers(0, pair.target.vocab_size, length).tolist())
            for length in PROMPT_LENGTHS
        ]
        return pair, [Request(prompt_ids=ids, max_tokens=RANDOM_TOKENS) for ids in prompts]
    config, path = load_config(DEMO)
    target, draft = (
        resolve_file(source.checkpoint, path) for source in (config.target, config.draft)
    )
    assert config.prompts is not None
    pair = check_pair(read_target(target), read_draft(draft))
    bundle = _build(None, pair, folder / "tokens", None)
    tokenizer, texts = load_tokenizer(bundle), read_prompts(resolve_file(config.prompts, path))
    return pair, [
        Request(prompt_ids=tuple(tokenizer.encode(text)), max_tokens=MAX_TOKENS)
        for text in texts[:PROMPTS]
    ]


def _build(
    shape: RandomPair | None, pair: Pair, folder: Path, engines: EngineOptions | None
) -> Bundle:
    if shape is not None:
        return build_random_pair(shape, pair, folder, engines, SilentProgress())
    config, path = load_config(DEMO)
    options = BuildOptions(engines=engines)
    build_bundle(pair, config, path.stem, folder, options, SilentProgress())
    return open_bundle(folder)


def _probe_bundles(
    gpu_bundle: Bundle,
    cpu_bundle: Bundle,
    requests: list[Request],
    *,
    with_speed: bool,
    counts_memory: bool,
) -> Iterator[Probe]:
    with closing(open_executor(cpu_bundle)) as cpu, closing(open_executor(gpu_bundle)) as gpu:
        assert isinstance(gpu, TensorRtExecutor) and isinstance(cpu, OnnxRuntimeExecutor)
        gpu.preload(("target", "draft", "target_only"))
        yield Probe(LOADS, True, "names, types, shapes and aliases are as built")
        ids, limits, manifest = requests[0].prompt_ids, gpu.limits, gpu_bundle.manifest
        rows = min(max(len(ids), 3 * limits.block_size), limits.prefill_chunk)
        prompt = np.resize(np.array(ids), (1, rows))  # repeated where it is short
        is_fp8 = manifest.graph_form.is_fp8
        yield from run_cache_probes(gpu, cpu, manifest, prompt)
        yield from run_shape_probes(gpu, cpu, is_fp8=is_fp8, counts_memory=counts_memory)
        yield from run_probes(gpu, cpu, requests, with_speed=with_speed)


def _probe_refusal(library: Library, path: Path) -> Probe:
    path.write_bytes(b"this is no engine" * 64)
    try:
        Loader(library, load_library(library), None).load(path)
    except DflashError as error:
        has_cause = not isinstance(error, RefusedError) or error.cause is not None
        return Probe(REFUSES, has_cause, error.message)
    return Probe(REFUSES, False, "it was taken for an engine")


def _probe_reopening(bundle: Bundle) -> Probe:
    started = time.perf_counter()
    with closing(open_executor(bundle, graphs=("target", "draft"))) as executor:
        assert isinstance(executor, TensorRtExecutor)
    seconds = time.perf_counter() - started
    return Probe(REOPENS, True, f"in {seconds:.1f} s", {"seconds": seconds})

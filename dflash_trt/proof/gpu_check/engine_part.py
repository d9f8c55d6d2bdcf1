"""The parts of the check that build one pair for PyTorch or TensorRT, run it and probe it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from dflash_trt.backends.device.executor import DeviceExecutor
from dflash_trt.backends.onnxruntime.executor import OnnxRuntimeExecutor
from dflash_trt.backends.registry import check_torch, open_executor
from dflash_trt.backends.tensorrt.build.builder import EngineOptions
from dflash_trt.backends.tensorrt.build.plugins import plugin_arch
from dflash_trt.backends.tensorrt.library import TORCH, Library, RefusedError, load_library
from dflash_trt.backends.tensorrt.run.engines import Loader
from dflash_trt.building.bundle_writer import build_bundle
from dflash_trt.building.spec import BuildSpec, CacheOptions
from dflash_trt.building.synthetic.gpt_oss import write_gpt_oss
from dflash_trt.building.synthetic.qwen3 import write_pair
from dflash_trt.bundle.bundle import Bundle, load_tokenizer, open_bundle
from dflash_trt.core.progress import SilentProgress
from dflash_trt.decoding import Request
from dflash_trt.deploy.planning.known_pairs import PairShape
from dflash_trt.errors import DflashError, import_extra
from dflash_trt.graph.bindings import GRAPH_NAMES
from dflash_trt.graph.form import CPU_FORM, CacheDtype, Precision
from dflash_trt.hardware.device import Device
from dflash_trt.hardware.gpus import Arch, arches
from dflash_trt.hardware.kernels import ONE_LAUNCH
from dflash_trt.models.build_config import BuildConfig, CheckpointSource, load_config, resolve_file
from dflash_trt.models.draft import read_draft
from dflash_trt.models.pair_check import Pair, check_pair
from dflash_trt.models.sizes import DecoderSizes, DraftShape, ExpertSizes, LayerSizes, TargetShape
from dflash_trt.models.target import read_target
from dflash_trt.proof.gpu_check.engine_probes import DRIFT, Bench, choose_probes
from dflash_trt.proof.gpu_check.gpu_record import PartSkippedError, Probe
from dflash_trt.proof.gpu_check.runner import Found, Setting, attempt, describe
from dflash_trt.text.prompts import read_prompts

DEMO = "demo"
PRECISION = Precision.BFLOAT16
PROMPTS, MAX_TOKENS = 4, 64
PROMPT_LENGTHS, RANDOM_TOKENS = (90, 5, 40, 70), 24

BUILDS, LOADS = "engines build", "engines load as their manifest says"
REFUSES = "a file that is no engine is refused, with a reason"
REOPENS = "engines open again with what was kept of the first time"

HIDDEN, MLP, VOCABULARY = 256, 192, 1000
LAYERS, DRAFT_LAYERS, TAPS = 5, 2, (1, 2)
# All are chosen: a choice between experts may fall otherwise in another precision, and then nothing
# could be compared.
EXPERTS = 4
WINDOW = 40
MAX_BATCH, PREFILL_CHUNK = 4, 96
# Attention in one launch, or in several splits and their merge.
SHORT, LONG = ONE_LAUNCH // 4, ONE_LAUNCH + 100
PAGE_SIZE = 16


@dataclass(frozen=True, slots=True)
class RandomPair:
    """A random pair with the heads and caches that public pairs have, built in seconds.

    Args:
        group: query heads per KV head.
        attention: Qwen3's (full); gpt-oss's, with sinks and a window in every other layer; Qwen3's
            and a draft with one sliding layer (window).
        kv_heads: fewer for a large group, so that all rows cost about the same.
        is_paged: pages of PAGE_SIZE positions; else linear caches.
        max_seq_len: positions of a sequence.
    """

    group: int
    attention: Literal["full", "sinks", "window"]
    head_dim: int
    is_paged: bool
    cache_dtype: CacheDtype
    kv_heads: int
    block_size: int
    max_seq_len: int

    @property
    def name(self) -> str:
        caches = "paged" if self.is_paged else "linear"
        codes = " FP8" if self.cache_dtype is CacheDtype.FP8 else ""
        return f"heads of {self.head_dim}, GQA {self.group}, {self.attention}, {caches}{codes}"

    @property
    def needs_plugins(self) -> bool:
        """Whether only this project's kernels have its caches."""
        return self.is_paged or self.cache_dtype is CacheDtype.FP8


_FP8, _AUTO = CacheDtype.FP8, CacheDtype.COMPUTE
PAIRS = (
    RandomPair(8, "full", 128, True, _FP8, 1, 16, LONG),
    RandomPair(8, "sinks", 64, False, _AUTO, 2, 8, LONG),
    RandomPair(4, "full", 128, False, _AUTO, 2, 16, LONG),
    RandomPair(4, "sinks", 64, True, _AUTO, 2, 8, LONG),
    RandomPair(1, "window", 64, False, _AUTO, 4, 8, SHORT),
    RandomPair(1, "full", 64, False, _FP8, 4, 16, LONG),
    RandomPair(1, "window", 128, True, _FP8, 2, 8, SHORT),
)
"""In order of worth: what the largest public pairs have comes first. Each value of the columns is
met in pages, in linear caches and without plugins, as a test checks."""


def check_engines(
    library: Library, shape: RandomPair | None, setting: Setting, *, plugins: bool
) -> Iterator[Probe]:
    """Probes of the demo pair's engines (`shape` None), or of a random pair's.

    Raises:
        PartSkippedError: the library is not here, or has nothing for this GPU.
    """
    arch = _find_arch(library, plugins=plugins)
    options = EngineOptions(arch, PRECISION, library, plugins=plugins)
    folder = setting.folder
    pair = read_demo() if shape is None else write_random_pair(shape, folder)
    cpu_bundle = build_pair(shape, pair, folder / "cpu")
    yield from attempt(REFUSES, _probe_refusal, library, folder / "no.engine")
    started = time.perf_counter()
    try:
        bundle = build_pair(shape, pair, folder / "gpu", options)
    except Exception as error:  # a library's own, too
        yield Probe(BUILDS, False, describe(error))
        return
    seconds, version = time.perf_counter() - started, str(load_library(library).__version__)
    detail = f"{library.name} {version}, {seconds:.1f} s"
    yield Probe(BUILDS, True, detail, {"seconds": seconds, "version": version})
    if plugins:
        assert bundle.manifest.engines is not None
        files = [bundle.folder / one.summary for one in bundle.manifest.engines.files]
        codes = {json.loads(file.read_bytes())["kernel_code"] for file in files}
        detail = f"built from {', '.join(sorted(codes))}"
        yield Probe("TensorRT takes kernels as machine code", codes == {"cubin"}, detail)

    yield from attempt(LOADS, _probe_bundles, shape, cpu_bundle, bundle)
    yield from attempt(REOPENS, _probe_reopening, bundle)


def check_programs(
    shape: RandomPair | None, precision: Precision, setting: Setting
) -> Iterator[Probe]:
    """The same probes of PyTorch's executor.

    Raises:
        PartSkippedError: PyTorch is not here, has no CUDA, or not for this GPU.
    """
    find_torch(precision)
    pair = read_demo() if shape is None else write_random_pair(shape, setting.folder)
    cpu_bundle = build_pair(shape, pair, setting.folder / "cpu")
    bundle = build_pair(shape, pair, setting.folder / "gpu", torch=precision)
    yield from attempt(LOADS, _probe_bundles, shape, cpu_bundle, bundle)


def find_torch(precision: Precision) -> None:
    """Raises PartSkippedError where PyTorch runs nothing on this GPU; it would take the CPU."""
    try:
        torch = import_extra("torch", TORCH, "--executor torch")
        if not torch.cuda.is_available():
            raise PartSkippedError(f"torch {torch.__version__} finds no GPU that it can use")
        check_torch(replace(CPU_FORM, precision=precision, draws=True))
    except DflashError as error:
        raise PartSkippedError(error.message) from error


def _probe_bundles(shape: RandomPair | None, cpu_bundle: Bundle, bundle: Bundle) -> Iterator[Probe]:
    with closing(open_executor(cpu_bundle)) as cpu, closing(open_executor(bundle)) as gpu:
        assert isinstance(gpu, DeviceExecutor) and isinstance(cpu, OnnxRuntimeExecutor)
        gpu.preload(GRAPH_NAMES)
        yield Probe(LOADS, True, "names, types, shapes and aliases are as built")
        bench = Bench(gpu, cpu, bundle.manifest, make_requests(shape, cpu_bundle))
        probes = choose_probes(gpu)
        if bundle.manifest.engines is None:
            del probes[DRIFT]  # PyTorch keeps what it frees, and others run beside it
        for name, find in probes.items():
            yield from attempt(name, find, bench)


def _find_arch(library: Library, *, plugins: bool) -> Arch:
    """The architecture of the GPU that is here, as `library` is to build for it.

    Raises:
        PartSkippedError: the library is missing or has no such GPU, or there are no kernels for it.
    """
    with closing(Device()) as device:
        arch = arches().get(device.arch) or Arch(
            name=device.arch,
            devices=device.name,
            largest_bytes=device.total_bytes,
            tensorrt_rtx="CURRENT",
        )
    try:
        load_library(library)
        if library.is_rtx and arch.tensorrt_rtx is None:
            raise PartSkippedError(f"{library.name} has no {arch.name}")
        if plugins:
            plugin_arch(arch.name)
    except DflashError as error:
        raise PartSkippedError(error.what) from error
    return arch


def read_demo() -> Pair:
    config, path = load_config(DEMO)
    sources = config.target.checkpoint, config.draft.checkpoint
    target, draft = (resolve_file(source, path) for source in sources)
    return check_pair(read_target(target), read_draft(draft))


def write_random_pair(shape: RandomPair, folder: Path) -> Pair:
    """Writes the checkpoints to `folder` and reads them as any others."""
    layer = LayerSizes(shape.group * shape.kv_heads, shape.kv_heads, shape.head_dim)
    sliding = replace(layer, window=WINDOW)
    has_sinks, has_scales = shape.attention == "sinks", shape.cache_dtype is CacheDtype.FP8
    layers = [sliding if has_sinks and not number % 2 else layer for number in range(LAYERS)]
    first = sliding if shape.attention == "window" else layer
    sizes = DecoderSizes(
        hidden_size=HIDDEN,
        intermediate_size=MLP,
        layers=tuple(layers),
        experts=ExpertSizes(EXPERTS, EXPERTS, MLP) if has_sinks else None,
    )
    drafted = (first, *[layer] * (DRAFT_LAYERS - 1))
    draft = DraftShape(
        sizes=replace(sizes, layers=drafted, experts=None),
        max_position_embeddings=2 * LONG,
        block_size=shape.block_size,
        mask_token_id=VOCABULARY - 1,
        target_layer_ids=TAPS,
        vocab_size=VOCABULARY,
    )
    target = TargetShape(sizes=sizes, vocab_size=VOCABULARY, max_position_embeddings=2 * LONG)
    pair = PairShape(name="random", target=target, draft=draft)
    if has_sinks:
        write_gpt_oss(folder, pair, random=True, has_kv_scales=has_scales)
    else:
        write_pair(folder, pair, random=True, has_kv_scales=has_scales)
    return check_pair(read_target(folder / "target"), read_draft(folder / "draft"))


def build_pair(
    shape: RandomPair | None,
    pair: Pair,
    folder: Path,
    engines: EngineOptions | None = None,
    torch: Precision | None = None,
) -> Bundle:
    """Engines, graphs for PyTorch, or graphs for the CPU with the same numbers.

    The CPU's caches are linear, whose bits are those of paged ones: they hold every position.
    """
    if shape is None:
        config, path = load_config(DEMO)
        name, spec = path.stem, BuildSpec()
    else:
        source, name = CheckpointSource(checkpoint="random"), "random"
        config = BuildConfig(
            description=shape.name,
            target=source,
            draft=source,
            max_batch=MAX_BATCH,
            max_seq_len=shape.max_seq_len,
            prefill_chunk=PREFILL_CHUNK,
        )
        caches = CacheOptions(
            kv_layout="paged" if shape.is_paged and (engines or torch) else "linear",
            kv_dtype=shape.cache_dtype.value,
            page_size=PAGE_SIZE,
        )
        spec = BuildSpec(caches=caches)
    arguments = pair, config, name, folder, spec, SilentProgress()
    build_bundle(*arguments, engines=engines, torch=torch)
    return open_bundle(folder)


def make_requests(shape: RandomPair | None, bundle: Bundle) -> list[Request]:
    """What a pair is asked: the demo's own prompts, or random ones."""
    if shape is None:
        config, path = load_config(DEMO)
        assert config.prompts is not None
        texts = read_prompts(resolve_file(config.prompts, path))[:PROMPTS]
        prompts, tokens = [*map(load_tokenizer(bundle).encode, texts)], MAX_TOKENS
    else:
        generator, vocab_size = np.random.default_rng(0), bundle.manifest.target.vocab_size
        prompts = [generator.integers(0, vocab_size, one).tolist() for one in PROMPT_LENGTHS]
        tokens = RANDOM_TOKENS
    return [Request(prompt_ids=tuple(ids), max_tokens=tokens) for ids in prompts]


def _probe_refusal(library: Library, path: Path) -> Found:
    path.write_bytes(b"this is no engine" * 64)
    try:
        Loader(library, load_library(library), None).read(path)
    except DflashError as error:
        has_cause = not isinstance(error, RefusedError) or error.cause is not None
        return has_cause, error.message
    return False, "it was taken for an engine"


def _probe_reopening(bundle: Bundle) -> Found:
    started = time.perf_counter()
    with closing(open_executor(bundle, graphs=("target", "draft"))) as executor:
        assert isinstance(executor, DeviceExecutor)
    seconds = time.perf_counter() - started
    return True, f"in {seconds:.1f} s", {"seconds": seconds}

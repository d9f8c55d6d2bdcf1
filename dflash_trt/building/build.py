"""What `build` does: one branch for each kind of executor."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dflash_trt.backends.tensorrt.build.builder import EngineOptions, local_arch
from dflash_trt.backends.tensorrt.library import LIBRARIES, TENSORRT_RTX, find_arch, load_library
from dflash_trt.building.caches import choose_caches
from dflash_trt.building.deployment import (
    BuiltDeployment,
    build_deployment,
    refuse_deployment_options,
)
from dflash_trt.building.named_pair import find_config
from dflash_trt.building.profile import on_profile
from dflash_trt.building.recipe import (
    PrecisionRecipe,
    check_idle_options,
    choose_recipe,
    find_texts,
    pair_quantization,
)
from dflash_trt.building.request import TRTLLM, BuildRequest
from dflash_trt.bundle.build import BuildOptions, build_bundle
from dflash_trt.bundle.manifest import Manifest
from dflash_trt.bundle.staging import check_destination
from dflash_trt.checkpoints.draft import read_draft
from dflash_trt.checkpoints.hub import find_checkpoint
from dflash_trt.checkpoints.pair import check_pair
from dflash_trt.checkpoints.target import read_target
from dflash_trt.config import (
    BuildConfig,
    CheckpointSource,
    HardwareProfile,
    resolve_builtin,
    resolve_file,
)
from dflash_trt.core.progress import Progress
from dflash_trt.errors import DflashError, refuse_options
from dflash_trt.graph.form import CacheDtype
from dflash_trt.hardware.gpus import DEFAULT_ARCH, find_gpu
from dflash_trt.text.prompts import read_prompts

EXECUTORS = ("cpu", *LIBRARIES, TRTLLM)


@dataclass(frozen=True, slots=True)
class BuiltBundle:
    """A bundle's folder and manifest.

    `added_end` is the tokenizer's end of text where the checkpoint's configs do not name it.
    """

    folder: Path
    manifest: Manifest
    added_end: int | None = None


def build(request: BuildRequest, progress: Progress) -> BuiltBundle | BuiltDeployment:
    """Builds what is asked for, whole or not at all.

    Raises:
        DflashError: options that do not go together, a pair or a limit that does not fit, a
            checkpoint that cannot be found or read, a disk that refuses.
    """
    config, path = find_config(request.target, request.checkpoints)
    choose_caches(request.caches, request.executor, plugins=request.engines.plugins)
    name, profile = request.profile, None
    if name is not None or request.executor == TRTLLM:
        name, config = on_profile(config, name, path)
        profile = config.profiles[name]
    config = request.limits.apply(config)
    if request.executor == TRTLLM:
        assert name is not None
        return build_deployment(request, config, path, name, progress)
    refuse_deployment_options(request.deployment)
    recipe, engines = _choose_precision(request, config, path, profile)
    return _write_bundle(request, config, path, recipe, engines, progress)


def _profile_arch(profile: HardwareProfile, executor: str, arch: str | None) -> str:
    """The architecture to build engines for; raises DflashError where the profile has none."""
    what, fix = None, "leave it out"
    if executor not in LIBRARIES:
        what = f"profiles describe GPUs; executor {executor} has none"
    elif profile.gpus > 1:
        what = f"has {profile.gpus} GPUs; engines run on one"
        fix = "choose a profile of one GPU, or --executor trtllm"
    elif arch not in (None, find_gpu(profile.gpu).arch):
        what = f"is for {find_gpu(profile.gpu).arch}, --arch says {arch}"
        fix = "leave one of them out"
    if what is not None:
        raise DflashError(what, where="--profile", fix=fix, usage=True)
    return find_gpu(profile.gpu).arch


def _choose_precision(
    request: BuildRequest, config: BuildConfig, path: Path, profile: HardwareProfile | None
) -> tuple[PrecisionRecipe, EngineOptions | None]:
    """What is computed and quantised, and with what engines."""
    wanted, library = request.engines, LIBRARIES.get(request.executor)
    arch = wanted.arch
    if profile is not None:
        arch = _profile_arch(profile, request.executor, arch)
    recipe = choose_recipe(config, path, request.precision, engines=library is not None)
    if library is None or library.is_rtx:
        _refuse_tensorrt_options(request)
    if library is None:
        refuse_options(
            {"--arch": arch},
            f"{arch!r} is for engines; the CPU executor runs the graphs themselves",
            f"add --executor {TENSORRT_RTX.executor}, or leave it out",
        )
        return recipe, None
    if arch is None and not library.is_rtx:
        load_library(library)
        arch = local_arch()
    found = find_arch(arch or DEFAULT_ARCH, library)
    return recipe, EngineOptions(
        found, recipe.compute, library, wanted.timing_cache, wanted.plugins
    )


def _refuse_tensorrt_options(request: BuildRequest) -> None:
    """Refuses what only TensorRT for data centres takes."""
    fix = "leave it out, or build with --executor tensorrt"
    cache, plugins = request.engines.timing_cache, request.engines.plugins
    refuse_options({"--timing-cache": cache}, "only TensorRT measures tactics as it builds", fix)
    refuse_options({"--plugins": plugins}, "only TensorRT takes this project's plugins", fix)


def _write_bundle(
    request: BuildRequest,
    config: BuildConfig,
    path: Path,
    recipe: PrecisionRecipe,
    engines: EngineOptions | None,
    progress: Progress,
) -> BuiltBundle:
    options, given = request.precision, request.checkpoints
    check_idle_options(recipe, options)
    texts = find_texts(recipe, config, path, options.calibration)
    output = request.output.output or Path(f"{path.stem}-bundle")
    check_destination(output, overwrite=request.output.overwrite)  # before anything is downloaded
    target_folder = _find(config.target, path, given.target_checkpoint, "--target-checkpoint")
    draft_folder = _find(config.draft, path, given.draft_checkpoint, "--draft-checkpoint")
    progress.stage("reading checkpoints", None)
    pair = check_pair(read_target(target_folder), read_draft(draft_folder))
    prompts = _prompts(config, path)
    caches = choose_caches(request.caches, request.executor, plugins=request.engines.plugins)
    quantization = None
    if texts is not None:
        lm_head = options.quantize_lm_head
        quantization = pair_quantization(
            recipe,
            pair,
            texts,
            quantize_lm_head=lm_head,
            kv_scales=caches.dtype is CacheDtype.FP8,
        )
    build_options = BuildOptions(
        copy_weights=request.output.copy_weights,
        hash_weights=request.output.hash_weights,
        overwrite=request.output.overwrite,
        engines=engines,
        page_size=caches.page_size,
        pages=caches.pages,
        cache_dtype=caches.dtype,
        quantization=quantization,
    )
    manifest = build_bundle(
        pair, config, path.stem, output, build_options, progress, prompts=prompts
    )
    ends = manifest.target.eos_token_ids
    added = next((one for one in ends if one not in pair.target.eos_token_ids), None)
    return BuiltBundle(output, manifest, added)


def _find(source: CheckpointSource, config_path: Path, given: Path | None, option: str) -> Path:
    """The folder of a checkpoint: the option's, what ships with the project, local, or hub."""
    if given is not None:
        return given
    builtin = resolve_builtin(source.checkpoint)
    if builtin is not None:
        return builtin
    return find_checkpoint(
        source.checkpoint, base=config_path.parent, revision=source.revision, option=option
    )


def _prompts(config: BuildConfig, config_path: Path) -> Path | None:
    """The prompts to carry along, once they have proved readable."""
    if config.prompts is None:
        return None
    path = resolve_file(config.prompts, config_path)
    if path.suffix != ".jsonl":
        raise DflashError("prompts must be a .jsonl file", where=path, usage=True)
    read_prompts(path)
    return path

"""What `build` does: one branch for each kind of executor."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dflash_trt.backends.registry import check_torch
from dflash_trt.backends.tensorrt.build.builder import EngineOptions, local_arch
from dflash_trt.backends.tensorrt.library import LIBRARIES, TORCH, find_arch, load_library
from dflash_trt.building.bundle_writer import build_bundle
from dflash_trt.building.deployment import BuiltDeployment, build_deployment
from dflash_trt.building.named_pair import find_config, takes_own_layer
from dflash_trt.building.profile import on_profile
from dflash_trt.building.quantize import choose_precisions, find_texts, plan_quantization
from dflash_trt.building.sources import check_own_layer, fetch, find_source
from dflash_trt.building.spec import BuildSpec
from dflash_trt.bundle.dims import int8_dims
from dflash_trt.bundle.manifest import Manifest
from dflash_trt.bundle.memory.memory import bundle_memory
from dflash_trt.bundle.support import CPU
from dflash_trt.core.progress import Progress
from dflash_trt.core.publish import check_destination
from dflash_trt.errors import DflashError
from dflash_trt.graph.form import CacheDtype, Precision
from dflash_trt.hardware.gpus import DEFAULT_ARCH, find_gpu
from dflash_trt.models.build_config import BuildConfig, HardwareProfile, resolve_file
from dflash_trt.models.draft import read_draft
from dflash_trt.models.pair_check import Pair, check_pair
from dflash_trt.models.target import read_target
from dflash_trt.quantization.int8 import select_int8
from dflash_trt.text.prompts import read_prompts


@dataclass(frozen=True, slots=True)
class BuiltBundle:
    """A bundle's folder and manifest.

    `added_end` is the tokenizer's end of text where the checkpoint's configs do not name it;
    `taps_by_rule` says that the draft's config does not name the tapped layers. `int8_weights` are
    the bytes in memory that a CPU bundle's weights would take with int8; None where it has that.
    """

    folder: Path
    manifest: Manifest
    added_end: int | None = None
    taps_by_rule: bool = False
    int8_weights: float | None = None


def build(spec: BuildSpec, progress: Progress) -> BuiltBundle | BuiltDeployment:
    """Builds what is asked for, whole or not at all.

    Raises:
        DflashError: options that do not go together, a pair or a limit that does not fit, a
            checkpoint that cannot be found or read, a disk that refuses.
    """
    config, path = find_config(spec.target, spec.checkpoints)
    spec.check_executor()
    name, profile = spec.profile, None
    if name is not None or spec.is_deployment:
        name, config = on_profile(config, name, path)
        profile = config.profiles[name]
    config = spec.apply(config)
    if spec.is_deployment:
        assert name is not None
        return build_deployment(spec, config, path, name, progress)
    compute, algorithms, int8 = choose_precisions(config, spec.precision, path, spec.executor)
    engines = _choose_engines(spec, profile, compute)
    texts = find_texts(config, path, spec.precision.calibration) if algorithms else None
    output = spec.output or Path(f"{path.stem}-bundle")
    check_destination(output, overwrite=spec.overwrite)  # before anything is downloaded
    takes_own = takes_own_layer(spec.checkpoints, config)
    sources = [(config.target, spec.checkpoints.target_checkpoint, "--target-checkpoint")]
    if not takes_own:
        sources.append((config.draft, spec.checkpoints.draft_checkpoint, "--draft-checkpoint"))
    folders = [
        given or fetch(find_source(source, path, None, option), path, option)
        for source, given, option in sources
    ]
    progress.stage("reading checkpoints", None)
    target, taps = read_target(folders[0]), spec.checkpoints.target_layer_ids
    if takes_own:
        check_own_layer(target.sizes, f"of the family {target.family}", folders[0])
    pair = check_pair(target, read_draft(folders[-1], taps))
    plan = None
    if texts is not None:
        plan = plan_quantization(
            pair,
            algorithms,
            texts,
            exclude=config.exclude,
            quantize_lm_head=spec.precision.quantize_lm_head,
            kv_scales=spec.cache_dtype is CacheDtype.FP8,
        )
    prompts, arguments = _prompts(config, path), (pair, config, path.stem, output, spec, progress)
    manifest = build_bundle(
        *arguments,
        engines=engines,
        torch=compute if spec.executor == TORCH else None,
        plan=plan,
        prompts=prompts,
        int8=int8,
    )
    ends = manifest.target.eos_token_ids
    added = next((one for one in ends if one not in pair.target.eos_token_ids), None)
    narrow = None
    if spec.executor == CPU and not (int8 or algorithms):
        narrow = _int8_weights(pair, manifest)
    return BuiltBundle(output, manifest, added, pair.draft.taps_by_rule, narrow)


def _int8_weights(pair: Pair, manifest: Manifest) -> float | None:
    """Bytes in memory of the weights of `pair` in int8; None where they are quantised."""
    models = ("target", pair.target), ("draft", pair.draft)
    try:
        dims = {
            owner: getattr(manifest, owner).model_copy(
                update={"int8": int8_dims(select_int8(model))}
            )
            for owner, model in models
        }
    except DflashError:
        return None
    return bundle_memory(manifest.model_copy(update=dims)).weights


def _choose_engines(
    spec: BuildSpec, profile: HardwareProfile | None, compute: Precision
) -> EngineOptions | None:
    """The engines to build; None where none are. DflashError where there is no such GPU."""
    if spec.executor == TORCH:
        check_torch()
    library, arch = LIBRARIES.get(spec.executor), spec.engines.arch
    if library is None:
        return None
    if profile is not None:
        arch = _profile_arch(profile, arch)
    elif arch is None and not library.is_rtx:
        load_library(library)
        arch = local_arch()
    found = find_arch(arch or DEFAULT_ARCH, library)
    return EngineOptions(found, compute, library, plugins=spec.engines.plugins)


def _profile_arch(profile: HardwareProfile, arch: str | None) -> str:
    """The architecture to build engines for; raises DflashError where the profile has none."""
    own = find_gpu(profile.gpu).arch
    what, fix = None, "leave one of them out"
    if profile.gpus > 1:
        what = f"has {profile.gpus} GPUs; engines run on one"
        fix = "choose a profile of one GPU, or --executor trtllm"
    elif arch not in (None, own):
        what = f"is for {own}, --arch says {arch}"
    if what is not None:
        raise DflashError(what, where="--profile", fix=fix, usage=True)
    return own


def _prompts(config: BuildConfig, config_path: Path) -> Path | None:
    """The prompts to carry along, once they have proved readable."""
    if config.prompts is None:
        return None
    path = resolve_file(config.prompts, config_path)
    if path.suffix != ".jsonl":
        raise DflashError("prompts must be a .jsonl file", where=path, usage=True)
    read_prompts(path)
    return path

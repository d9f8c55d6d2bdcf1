"""`dflash-trt build`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from dflash_trt.backends.tensorrt.build.builder import EngineOptions, local_arch
from dflash_trt.backends.tensorrt.library import LIBRARIES, TENSORRT_RTX, load_library
from dflash_trt.bundle.build import BuildOptions, build_bundle
from dflash_trt.bundle.engine_memory import bundle_scratch
from dflash_trt.bundle.manifest import EngineSet, Manifest
from dflash_trt.bundle.staging import check_destination
from dflash_trt.bundle.summary import (
    cache_bytes,
    cache_line,
    engine_bytes,
    precision_line,
    quantization_line,
)
from dflash_trt.checkpoints.draft import read_draft
from dflash_trt.checkpoints.hub import find_checkpoint
from dflash_trt.checkpoints.pair import check_pair
from dflash_trt.checkpoints.target import read_target
from dflash_trt.cli.build_trtllm import (
    TRTLLM,
    DeploymentRequest,
    build_deployment,
    refuse_trtllm_options,
    trtllm_options,
)
from dflash_trt.cli.kv_layout import choose_caches, kv_layout_options
from dflash_trt.cli.precision import (
    PRECISIONS,
    Recipe,
    check_idle_options,
    choose_recipe,
    find_texts,
    pair_quantization,
)
from dflash_trt.cli.profile import apply_profile, profile_arch
from dflash_trt.cli.progress import StageBars, format_size
from dflash_trt.config import (
    MAX_COUNT,
    BuildConfig,
    CheckpointSource,
    PrecisionName,
    choose_profile,
    load_config,
    resolve_builtin,
    resolve_file,
)
from dflash_trt.errors import DflashError
from dflash_trt.hardware.arch import DEFAULT_ARCH, find_arch
from dflash_trt.text.prompts import read_prompts

_FOLDER = click.Path(file_okay=False, path_type=Path)


@click.command("build", short_help="Turn a target and a draft checkpoint into a bundle.")
@click.option("--target", "name", required=True, help="A name from `targets`, or a YAML file.")
@click.option("--target-checkpoint", type=_FOLDER, help="Folder to use for the target.")
@click.option("--draft-checkpoint", type=_FOLDER, help="Folder to use for the draft.")
@click.option(
    "--executor",
    type=click.Choice(["cpu", *LIBRARIES, TRTLLM]),
    default="cpu",
    show_default=True,
    help="What will run the bundle.",
)
@click.option(
    "--profile", help="Hardware to build for, a name from `targets`.  [trtllm: the only one]"
)
@click.option(
    "--arch",
    help=f"GPU to build engines for.  [default: {DEFAULT_ARCH}; tensorrt: the GPU that is here]",
)
@click.option(
    "--precision",
    type=click.Choice(PRECISIONS),
    help="fp8, nvfp4: quantize the target and the draft. bf16, fp16: what engines compute in "
    "(the CPU: fp32).  [default: bf16; fp32]",
)
@click.option(
    "--timing-cache",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Where TensorRT keeps timings between builds.  [default: in the user's cache folder]",
)
@click.option(
    "--draft-precision",
    type=click.Choice(PRECISIONS),
    help="The same for the draft; bf16, fp16: leave it as it is.  [default: as --precision; "
    "trtllm: as it is]",
)
@click.option(
    "--calibration",
    type=click.Path(dir_okay=False, path_type=Path),
    help='Texts to quantize with: .jsonl with a "prompt" each.  [default: the target\'s prompts]',
)
@click.option(
    "--exclude",
    multiple=True,
    metavar="PATTERN",
    help="Quantize all but these modules, as in '*.self_attn.*'; repeatable.",
)
@click.option("--quantize-lm-head", is_flag=True, help="Quantize the target's lm_head too.")
@click.option("--plugins", is_flag=True, help="Use this project's kernels, as TensorRT plugins.")
@click.option("--max-batch", type=click.IntRange(1, MAX_COUNT), help="Sequences decoded together.")
@click.option(
    "--max-seq-len",
    type=click.IntRange(3, MAX_COUNT),
    help="Tokens of one sequence, prompt and output.",
)
@click.option(
    "--block-size", type=click.IntRange(2), help="Rows of a verify step; at most the trained."
)
@kv_layout_options
@click.option(
    "--copy-weights", is_flag=True, help="Copy weight files, so that onnx's tools open the bundle."
)
@click.option("--hash-weights", is_flag=True, help="Record the weight files' full SHA-256.")
@click.option("--overwrite", is_flag=True, help="Replace a bundle that exists.")
@trtllm_options
@click.option(
    "-o",
    "--output",
    type=_FOLDER,
    help="The bundle's folder.  [default: ./NAME-bundle; trtllm: ./NAME-PROFILE]",
)
def command(
    name: str,
    target_checkpoint: Path | None,
    draft_checkpoint: Path | None,
    executor: str,
    profile: str | None,
    arch: str | None,
    precision: PrecisionName | None,
    draft_precision: PrecisionName | None,
    calibration: Path | None,
    exclude: tuple[str, ...],
    quantize_lm_head: bool,
    timing_cache: Path | None,
    plugins: bool,
    max_batch: int | None,
    max_seq_len: int | None,
    block_size: int | None,
    kv_layout: str,
    kv_dtype: str,
    page_size: int | None,
    kv_pages: int | None,
    copy_weights: bool,
    hash_weights: bool,
    overwrite: bool,
    output: Path | None,
    **trtllm: Any,
) -> None:
    """Turn a target and a draft checkpoint into a bundle.

    A bundle is a folder with the pair's graphs, its weights (linked, not copied, where the
    filesystem allows) and its tokenizer; every other command works on it. Checkpoints in high
    precision can be quantized on the way: the bundle's weights are then its own.

    With `--executor trtllm` it is a deployment instead: TensorRT-LLM's own files for DFlash,
    EAGLE-3 and autoregressive decoding of the pair on a hardware profile. Checkpoints may stay
    names on the hub.
    """
    config, path = load_config(name)
    caches = choose_caches(
        kv_layout=kv_layout,
        kv_dtype=kv_dtype,
        page_size=page_size,
        kv_pages=kv_pages,
        executor=executor,
        plugins=plugins,
    )
    if profile is not None or executor == TRTLLM:
        profile = choose_profile(config, profile, path)
        config = apply_profile(config, config.profiles[profile])
    given = {"max_batch": max_batch, "max_seq_len": max_seq_len, "block_size": block_size}
    config = config.model_copy(update={key: value for key, value in given.items() if value})
    if executor == TRTLLM:
        assert profile is not None
        build_deployment(
            config,
            path,
            DeploymentRequest(
                profile=profile,
                target_checkpoint=target_checkpoint,
                draft_checkpoint=draft_checkpoint,
                precision=precision,
                draft_precision=draft_precision,
                calibration=calibration,
                exclude=exclude,
                quantize_lm_head=quantize_lm_head,
                copy_weights=copy_weights,
                overwrite=overwrite,
                output=output,
                idle={
                    "--arch": arch is not None,
                    "--timing-cache": timing_cache is not None,
                    "--hash-weights": hash_weights,
                    "--plugins": plugins,
                },
                given=trtllm,
            ),
        )
        return
    refuse_trtllm_options(trtllm)
    if profile is not None:
        arch = profile_arch(config.profiles[profile], executor, arch)
    recipe = choose_recipe(
        config, path, precision, draft_precision, exclude, engines=executor in LIBRARIES
    )
    engines = _engine_options(executor, arch, recipe, timing_cache, plugins)
    check_idle_options(recipe, calibration, exclude, quantize_lm_head)
    texts = find_texts(recipe, config, path, calibration)
    output = output or Path(f"{path.stem}-bundle")
    check_destination(output, overwrite=overwrite)  # before anything is downloaded
    target_folder = _find(config.target, path, target_checkpoint, "--target-checkpoint")
    draft_folder = _find(config.draft, path, draft_checkpoint, "--draft-checkpoint")
    with StageBars() as bars:
        bars.stage("reading checkpoints", None)
        pair = check_pair(read_target(target_folder), read_draft(draft_folder))
        prompts = _prompts(config, path)
        options = BuildOptions(
            copy_weights=copy_weights,
            hash_weights=hash_weights,
            overwrite=overwrite,
            engines=engines,
            page_size=caches.page_size,
            pages=caches.pages,
            cache_dtype=caches.dtype,
            quantization=None
            if texts is None
            else pair_quantization(recipe, pair, texts, quantize_lm_head=quantize_lm_head),
        )
        manifest = build_bundle(pair, config, path.stem, output, options, bars, prompts=prompts)
    _show(output, manifest)


def _show(output: Path, manifest: Manifest) -> None:
    click.echo(
        f"{output}: {manifest.target.family} target of {manifest.target.layers} layers "
        f"({manifest.target.parameters:,} parameters), DFlash draft of {manifest.draft.layers} "
        f"({manifest.draft.parameters:,}), block {manifest.limits.block_size}, "
        f"{precision_line(manifest)}weights {manifest.weights}"
    )
    for owner, dims in (("target", manifest.target), ("draft", manifest.draft)):
        line = quantization_line(dims, manifest.kv_dtype)
        if line is not None:
            click.echo(f"quantised {owner}: {line}")
    if manifest.page_pool is not None or manifest.kv_dtype != "auto":
        click.echo(f"KV caches: {cache_line(manifest)}")
    if manifest.engines is not None:
        sizes = engine_bytes(manifest)
        click.echo(
            f"engines for {manifest.engines.arch} in {manifest.compute_dtype}: "
            + ", ".join(f"{graph} {format_size(size)}" for graph, size in sizes.items())
            + f"; {_allocated(manifest, manifest.engines)}"
        )
    if not manifest.tokenizer:
        click.echo(
            "note: the target has no tokenizer.json; the bundle takes token ids only", err=True
        )


def _allocated(manifest: Manifest, engines: EngineSet) -> str:
    """What an engine bundle takes of the device beside its weights, from the start."""
    layout, shape = "linear", (manifest.limits.max_batch, engines.cache_length)
    if manifest.page_pool is not None:
        layout, shape = "paged", (manifest.page_pool.pages + 1, manifest.page_pool.page_size)
    size = sum(cache_bytes(manifest)) * shape[0] * shape[1]
    shares = bundle_scratch(manifest)
    return (
        f"{layout} caches {format_size(size)} ({shape[0]} × {shape[1]} positions, allocated whole)"
        + (f", shares of split attention {format_size(shares)}" if shares else "")
    )


def _engine_options(
    executor: str, arch: str | None, recipe: Recipe, timing_cache: Path | None, plugins: bool
) -> EngineOptions | None:
    """What engines are asked for; None for the CPU, which has none of these options."""
    library = LIBRARIES.get(executor)
    if timing_cache is not None and (library is None or library.is_rtx):
        raise DflashError(
            "only TensorRT measures tactics as it builds",
            where="--timing-cache",
            fix="leave it out, or build with --executor tensorrt",
            usage=True,
        )
    if plugins and (library is None or library.is_rtx):
        raise DflashError(
            "only TensorRT takes this project's plugins",
            where="--plugins",
            fix="leave it out, or build with --executor tensorrt",
            usage=True,
        )
    if library is not None:
        if arch is None and not library.is_rtx:
            load_library(library)
            arch = local_arch()
        found = find_arch(arch or DEFAULT_ARCH, library)
        return EngineOptions(found, recipe.compute, library, timing_cache, plugins)
    if arch is not None:
        raise DflashError(
            f"{arch!r} is for engines; the CPU executor runs the graphs themselves",
            where="--arch",
            fix=f"add --executor {TENSORRT_RTX.executor}, or leave it out",
            usage=True,
        )
    return None


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

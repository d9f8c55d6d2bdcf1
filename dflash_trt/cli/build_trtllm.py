"""`dflash-trt build --executor trtllm`: the options that only it has, and what it does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import click

from dflash_trt.bundle.build import TOKENIZER_FILES
from dflash_trt.bundle.quantize import plan_quantization, quantize_pair
from dflash_trt.bundle.staging import check_destination
from dflash_trt.checkpoints.draft import read_draft
from dflash_trt.checkpoints.hub import find_checkpoint, local_checkpoint
from dflash_trt.checkpoints.pair import check_pair
from dflash_trt.checkpoints.target import read_target
from dflash_trt.cli.precision import (
    check_idle_options,
    choose_recipe,
    find_texts,
    pair_quantization,
)
from dflash_trt.cli.progress import StageBars, format_size
from dflash_trt.config import (
    MAX_COUNT,
    QUANTIZED,
    BuildConfig,
    CheckpointSource,
    Eagle3Source,
    PrecisionName,
    load_config,
    resolve_builtin,
    target_names,
)
from dflash_trt.errors import DflashError, one_line
from dflash_trt.planning.known_pairs import PairShape, find_pair
from dflash_trt.planning.read_shapes import (
    read_draft_shape,
    read_pair_shape,
    read_target_shape,
)
from dflash_trt.speculation.schedule import BlockSchedule
from dflash_trt.trtllm.plan import DeploymentOptions, check_draft, plan_deployment
from dflash_trt.trtllm.record import DEPLOYMENT, Deployment
from dflash_trt.trtllm.schema import ATTENTION_BACKENDS
from dflash_trt.trtllm.versions import DEFAULT_VERSION, VERSIONS, find_version
from dflash_trt.trtllm.write import ModelSource, Sources, write_deployment

TRTLLM = "trtllm"

F = TypeVar("F", bound=Callable[..., Any])


def trtllm_options(function: F) -> F:
    """Options of `build` that mean nothing to other executors; they arrive as keywords."""
    for option in (
        click.option(
            "--context-recompute-tail",
            type=click.IntRange(0, MAX_COUNT),
            help="trtllm: prompt tokens computed again after a prefix-cache hit, for the drafter.  "
            "[default: all]",
        ),
        click.option(
            "--eagle-checkpoint",
            help="trtllm: an EAGLE-3 draft to compare with, a folder or hub name.",
        ),
        click.option(
            "--attention-backend",
            type=click.Choice(ATTENTION_BACKENDS),
            help="trtllm: the draft's attention.  [default: by the GPU]",
        ),
        click.option(
            "--block-schedule",
            type=click.Path(dir_okay=False, path_type=Path),
            help="trtllm: a block_schedule.json, which block at how many sequences.",
        ),
        click.option(
            "--trtllm-version",
            help=f"trtllm: {' or '.join(VERSIONS)}.  [default: {DEFAULT_VERSION}]",
        ),
    ):
        function = option(function)
    return function


def refuse_trtllm_options(given: Mapping[str, Any]) -> None:
    """Raises DflashError when one of them is given to another executor."""
    for name, value in given.items():
        if value is not None:
            raise DflashError(
                "is for TensorRT-LLM deployments",
                where=f"--{name.replace('_', '-')}",
                fix=f"add --executor {TRTLLM}, or leave it out",
                usage=True,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentRequest:
    """What the command line asks of a deployment, beyond the configuration and its limits.

    `given` are the options of `trtllm_options`; `idle` are others that were given and mean
    nothing here, by name.
    """

    profile: str
    target_checkpoint: Path | None
    draft_checkpoint: Path | None
    precision: PrecisionName | None
    draft_precision: PrecisionName | None
    calibration: Path | None
    exclude: tuple[str, ...]
    quantize_lm_head: bool
    copy_weights: bool
    overwrite: bool
    output: Path | None
    idle: Mapping[str, bool]
    given: Mapping[str, Any]


def build_deployment(config: BuildConfig, path: Path, request: DeploymentRequest) -> None:
    """Writes the deployment and says what it is.

    Models stay names of the hub where neither a folder is given nor weights must be quantised:
    TensorRT-LLM downloads them itself.
    """
    for option, value in request.idle.items():
        if value:
            raise DflashError(
                "does nothing for a TensorRT-LLM deployment",
                where=option,
                fix="leave it out",
                usage=True,
            )
    output = request.output or Path(f"{path.stem}-{request.profile}")
    check_destination(output, overwrite=request.overwrite, kind=DEPLOYMENT)
    config = _with_precision(config, request)
    quantizes = bool({config.precision, config.draft_precision} & set(QUANTIZED))
    sources = Sources(
        target=_source(config.target, path, request.target_checkpoint, "--target-checkpoint"),
        draft=_source(config.draft, path, request.draft_checkpoint, "--draft-checkpoint"),
        precision={},
    )
    sources = _with_eagle3(sources, config, path, request.given["eagle_checkpoint"])
    if request.copy_weights and not quantizes and not sources.folders:
        raise DflashError(
            "does nothing where models stay names on the hub",
            where="--copy-weights",
            fix="pass --target-checkpoint or --draft-checkpoint, or leave it out",
            usage=True,
        )
    if not quantizes and sources.draft.revision is not None:
        raise DflashError(
            "TensorRT-LLM cannot be told a draft's revision",
            where=f"{path}, draft",
            fix="pass --draft-checkpoint",
            usage=True,
        )
    with StageBars() as bars:
        bars.stage("reading checkpoints", None)
        pair = _read_shapes(sources, config, path)
        plan = plan_deployment(config, path, request.profile, pair, _options(request.given))
        if not quantizes:
            check_idle_options(
                choose_recipe(config, path, None, request.draft_precision, (), engines=True),
                request.calibration,
                request.exclude,
                request.quantize_lm_head,
            )
        quantize = None
        if quantizes:
            sources, quantize = _quantization(sources, config, path, request, output, bars)
        deployment = write_deployment(
            plan,
            sources,
            output,
            bars,
            overwrite=request.overwrite,
            copy_weights=request.copy_weights,
            quantize=quantize,
        )
    _show(output, deployment)
    schedule = request.given["block_schedule"]
    if schedule is not None:
        measured = one_line(BlockSchedule.read(schedule).executor, 40)
        click.echo(
            f"note: {schedule} was measured on executor {measured}, not with TensorRT-LLM on "
            f"{plan.gpu.title}",
            err=True,
        )
    folder = sources.target.folder
    if folder is not None and not (folder / TOKENIZER_FILES[0]).is_file():
        click.echo(
            f"note: {folder} has no {TOKENIZER_FILES[0]}, which TensorRT-LLM needs", err=True
        )


def _with_precision(config: BuildConfig, request: DeploymentRequest) -> BuildConfig:
    """`config` with the command line's recipe; a precision of None leaves the checkpoints alone.

    As for other executors, a precision that is given replaces the configuration's whole recipe.
    """
    update: dict[str, object] = {}
    if request.precision is not None:
        update = {"precision": request.precision, "draft_precision": None, "exclude": ()}
    if request.draft_precision is not None:
        update["draft_precision"] = request.draft_precision
    if request.exclude:
        update["exclude"] = request.exclude
    config = config.model_copy(update=update)
    if config.precision in ("fp32", "fp16"):
        raise DflashError(
            f"{config.precision!r} is not what TensorRT-LLM runs these checkpoints in",
            where="--precision",
            fix="choose fp8 or nvfp4, or leave it out",
            usage=True,
        )
    return config.model_copy(update={"precision": None}) if config.precision == "bf16" else config


def _options(given: Mapping[str, Any]) -> DeploymentOptions:
    return DeploymentOptions(
        version=find_version(given["trtllm_version"] or DEFAULT_VERSION),
        schedule=given["block_schedule"],
        backend=given["attention_backend"],
        recompute_tail=given["context_recompute_tail"],
    )


def _source(source: CheckpointSource, path: Path, given: Path | None, option: str) -> ModelSource:
    """A folder where there is one: the option's, one that ships with the project, a local one."""
    if given is not None and not given.is_dir():
        raise DflashError("there is no such folder", where=option, usage=True)
    folder = (
        given
        or resolve_builtin(source.checkpoint)
        or local_checkpoint(source.checkpoint, base=path.parent)
    )
    if folder is not None:
        return ModelSource(folder=folder)
    return ModelSource(name=source.checkpoint, revision=source.revision)


def _with_eagle3(sources: Sources, config: BuildConfig, path: Path, given: str | None) -> Sources:
    """The sources with an EAGLE-3 draft, where the command line or the configuration has one."""
    eagle3, where = config.eagle3, path
    if given is not None:
        length = Eagle3Source.model_fields["max_draft_len"].default
        length = length if eagle3 is None else eagle3.max_draft_len
        eagle3, where = Eagle3Source(checkpoint=given, max_draft_len=length), Path("./x")
    if eagle3 is None:
        return sources
    source = _source(eagle3, where, None, "--eagle-checkpoint")
    return replace(sources, eagle3=source, eagle3_draft_len=eagle3.max_draft_len)


def _read_shapes(sources: Sources, config: BuildConfig, path: Path) -> PairShape:
    """Shapes from the folders there are, else of the public pair that the configuration names.

    A draft's folder is held to its target: to the checkpoint where that is at hand.
    """
    target, draft = sources.target.folder, sources.draft.folder
    if target is not None and draft is not None:
        check_pair(read_target(target), read_draft(draft))
        return read_pair_shape(target, draft)
    known = find_pair(_public_name(config, path))
    if draft is not None:
        check_draft(read_draft(draft), known)
        return replace(known, draft=read_draft_shape(draft, known.target))
    if target is not None:
        shape = read_target_shape(target)
        if (shape.layers, shape.hidden) != (known.target.layers, known.target.hidden):
            raise DflashError(
                f"has {shape.layers} layers of width {shape.hidden}; the target of "
                f"{sources.draft.name} has {known.target.layers} of {known.target.hidden}",
                where=target,
                fix="pass --draft-checkpoint too",
                usage=True,
            )
        return replace(known, target=shape)
    return known


def _public_name(config: BuildConfig, path: Path) -> str:
    """The shipped configuration of the same checkpoints: a user's copy has another name."""
    for name in target_names():
        one = load_config(name)[0]
        if (one.target.checkpoint, one.draft.checkpoint) == (
            config.target.checkpoint,
            config.draft.checkpoint,
        ):
            return name
    return path.stem


def _quantization(
    sources: Sources,
    config: BuildConfig,
    path: Path,
    request: DeploymentRequest,
    output: Path,
    bars: StageBars,
) -> tuple[Sources, Callable[[Path], Mapping[str, Path]]]:
    """Sources with both checkpoints at hand, and what quantises them.

    The draft stays as it is unless asked: that TensorRT-LLM loads a quantised one is not
    documented.
    """
    recipe = choose_recipe(
        config,
        path,
        config.precision or "bf16",
        config.draft_precision or "bf16",
        config.exclude,
        engines=True,
    )
    texts = find_texts(recipe, config, path, request.calibration)
    assert texts is not None
    target = _fetch(sources.target, path, "--target-checkpoint")
    draft = _fetch(sources.draft, path, "--draft-checkpoint")
    pair = check_pair(read_target(target), read_draft(draft))
    wanted = pair_quantization(recipe, pair, texts, quantize_lm_head=request.quantize_lm_head)
    planned = plan_quantization(pair, wanted)

    def quantize(folder: Path) -> Mapping[str, Path]:
        made = quantize_pair(planned, folder, output, bars)
        paths = {"target": made.target.checkpoint.path, "draft": made.draft.checkpoint.path}
        return {role: path for role, path in paths.items() if role in recipe.algorithms}

    if "target" in recipe.algorithms:
        sources = replace(sources, target=ModelSource(folder=target))
    if "draft" in recipe.algorithms:
        sources = replace(sources, draft=ModelSource(folder=draft))
    precision = {str(role): one.value for role, one in recipe.algorithms.items()}
    return replace(sources, precision=precision), quantize


def _fetch(source: ModelSource, path: Path, option: str) -> Path:
    """The model's folder, downloaded where it is a name."""
    return source.folder or find_checkpoint(
        source.name or "", base=path.parent, revision=source.revision, option=option
    )


def _show(output: Path, deployment: Deployment) -> None:
    memory, profile = deployment.memory, deployment.profile
    click.echo(
        f"{output}: {', '.join(deployment.variants)} of {deployment.name} on {profile.gpus} × "
        f"{profile.gpu}, {deployment.max_batch} sequences of {deployment.max_seq_len} tokens, "
        f"{deployment.max_draft_len} drafts, attention backend {deployment.attention_backend}; "
        f"target {deployment.target}, draft {deployment.draft}"
    )
    click.echo(
        f"memory of a GPU: weights {format_size(memory.weights)}, draft context "
        f"{format_size(memory.draft_context)}, KV cache at least {format_size(memory.kv_pool)} "
        f"({memory.sequences} sequences of {deployment.max_seq_len} tokens), of "
        f"{format_size(memory.gpu_memory)}"
    )
    click.echo(f"checked against {deployment.checked}; not run. {output}/README.md says how to")

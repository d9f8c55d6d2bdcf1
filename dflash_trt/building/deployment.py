"""A TensorRT-LLM deployment of a pair, from a request to its folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path

from dflash_trt.building.profile import is_plain
from dflash_trt.building.recipe import (
    check_idle_options,
    choose_recipe,
    find_texts,
    pair_quantization,
)
from dflash_trt.building.request import TRTLLM, BuildRequest, DeploymentRequest, PrecisionOptions
from dflash_trt.building.sources import find_source, read_shapes
from dflash_trt.bundle.build import TOKENIZER_NAME
from dflash_trt.bundle.quantize import plan_quantization, quantize_pair
from dflash_trt.bundle.staging import check_destination
from dflash_trt.checkpoints.draft import read_draft
from dflash_trt.checkpoints.hub import find_checkpoint
from dflash_trt.checkpoints.pair import check_draft, check_pair
from dflash_trt.checkpoints.target import read_target
from dflash_trt.config import (
    BuildConfig,
    Eagle3Source,
)
from dflash_trt.core.formats import QUANTIZED
from dflash_trt.core.progress import Progress
from dflash_trt.errors import DflashError, one_line, refuse_options
from dflash_trt.planning.known_pairs import PairShape
from dflash_trt.speculation.schedule import BlockSchedule
from dflash_trt.trtllm.arguments import ModelSource, Sources, packages
from dflash_trt.trtllm.plan import DeploymentOptions, DeploymentPlan, fit_batch, plan_deployment
from dflash_trt.trtllm.record import DEPLOYMENT, Deployment
from dflash_trt.trtllm.versions import DEFAULT_VERSION, absent, find_version, load_native
from dflash_trt.trtllm.write import write_deployment


@dataclass(frozen=True, slots=True)
class BuiltDeployment:
    """A deployment's folder and record; `notes` are what its user should know besides."""

    folder: Path
    record: Deployment
    notes: tuple[str, ...]


def refuse_deployment_options(options: DeploymentRequest) -> None:
    """Raises DflashError when one of them is given to another executor."""
    given = {
        f"--{one.name.replace('_', '-')}": getattr(options, one.name) for one in fields(options)
    }
    fix = f"add --executor {TRTLLM}, or leave it out"
    refuse_options(given, "is for TensorRT-LLM deployments", fix)


def build_deployment(
    request: BuildRequest, config: BuildConfig, path: Path, profile: str, progress: Progress
) -> BuiltDeployment:
    """Writes the deployment of the configuration `config`, read from `path`, on `profile`.

    Models stay names of the hub where neither a folder is given nor weights must be quantised:
    TensorRT-LLM downloads them itself.
    """
    _refuse_idle_options(request)
    options = request.deployment
    output = request.output.output or Path(f"{path.stem}-{profile}")
    check_destination(output, overwrite=request.output.overwrite, kind=DEPLOYMENT)
    config = _with_precision(config, request.precision)
    quantizes = bool({config.precision, config.draft_precision} & set(QUANTIZED))
    given = request.checkpoints
    sources = Sources(
        target=find_source(config.target, path, given.target_checkpoint, "--target-checkpoint"),
        draft=find_source(config.draft, path, given.draft_checkpoint, "--draft-checkpoint"),
        precision={},
    )
    sources = _with_eagle3(sources, config, path, options.eagle_checkpoint)
    if request.output.copy_weights and not quantizes and not sources.folders:
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
    progress.stage("reading checkpoints", None)
    pair = _read_pair(sources, config, path)
    if pair.draft.markov_rank:
        sources = replace(sources, drafting="dspark")
    wanted = DeploymentOptions(
        version=find_version(options.trtllm_version or DEFAULT_VERSION),
        schedule=options.block_schedule,
        backend=options.attention_backend,
        llm_args=options.llm_arg,
    )
    if request.limits.max_batch is None and is_plain(profile, config.profiles[profile]):
        config = fit_batch(config, path, profile, pair, wanted)
    plan = plan_deployment(config, path, profile, pair, wanted)
    quantize = None
    if quantizes:
        sources, quantize = _quantization(sources, config, path, request, output, progress)
    else:
        unquantised = replace(request.precision, precision=None, exclude=())
        recipe = choose_recipe(config, path, unquantised, engines=True)
        check_idle_options(recipe, request.precision)
    record = write_deployment(
        plan,
        sources,
        output,
        progress,
        overwrite=request.output.overwrite,
        copy_weights=request.output.copy_weights,
        quantize=quantize,
    )
    return BuiltDeployment(output, record, tuple(_notes(options, plan, sources)))


def _refuse_idle_options(request: BuildRequest) -> None:
    given = {
        "--arch": request.engines.arch,
        "--timing-cache": request.engines.timing_cache,
        "--hash-weights": request.output.hash_weights,
        "--plugins": request.engines.plugins,
    }
    refuse_options(given, "does nothing for a TensorRT-LLM deployment", "leave it out")


def _notes(options: DeploymentRequest, plan: DeploymentPlan, sources: Sources) -> Iterator[str]:
    schedule, folder = options.block_schedule, sources.target.folder
    if schedule is not None:
        measured = one_line(BlockSchedule.read(schedule).executor, 40)
        yield (
            f"{schedule} was measured on executor {measured}, not with TensorRT-LLM on "
            f"{plan.gpu.title}"
        )
    if folder is not None and not (folder / TOKENIZER_NAME).is_file():
        yield f"{folder} has no {TOKENIZER_NAME}, which TensorRT-LLM needs"
    if load_native(plan.version) is not None:
        for module in absent(packages(plan, sources.drafting)):
            yield f"{module} cannot be imported here; attention backend {plan.backend} needs it"


def _with_precision(config: BuildConfig, options: PrecisionOptions) -> BuildConfig:
    """`config` with the request's recipe, whole; precision None leaves the checkpoints alone."""
    update: dict[str, object] = {}
    if options.precision is not None:
        update = {"precision": options.precision, "draft_precision": None, "exclude": ()}
    if options.draft_precision is not None:
        update["draft_precision"] = options.draft_precision
    if options.exclude:
        update["exclude"] = options.exclude
    config = config.model_copy(update=update)
    if config.precision in ("fp32", "fp16"):
        raise DflashError(
            f"{config.precision!r} is not what TensorRT-LLM runs these checkpoints in",
            where="--precision",
            fix="choose fp8 or nvfp4, or leave it out",
            usage=True,
        )
    return config.model_copy(update={"precision": None}) if config.precision == "bf16" else config


def _with_eagle3(sources: Sources, config: BuildConfig, path: Path, given: str | None) -> Sources:
    """The sources with an EAGLE-3 draft, where the command line or the configuration has one."""
    eagle3, where = config.eagle3, path
    if given is not None:
        known = eagle3 or Eagle3Source(checkpoint=given)
        eagle3 = known.model_copy(update={"checkpoint": given, "revision": None})
        where = Path("./x")
    if eagle3 is None:
        return sources
    source = find_source(eagle3, where, None, "--eagle-checkpoint")
    return replace(sources, eagle3=source, eagle3_draft_len=eagle3.max_draft_len)


def _read_pair(sources: Sources, config: BuildConfig, path: Path) -> PairShape:
    """The pair's shapes; where there are folders, their weights must fit each other."""
    target, draft = sources.target.folder, sources.draft.folder
    if target is not None and draft is not None:
        check_pair(read_target(target), read_draft(draft))
    pair = read_shapes(sources.target, sources.draft, config, path)
    if target is None and draft is not None:
        check_draft(read_draft(draft), pair.target.sizes, pair.target.vocab_size, pair.name)
    return pair


def _quantization(
    sources: Sources,
    config: BuildConfig,
    path: Path,
    request: BuildRequest,
    output: Path,
    progress: Progress,
) -> tuple[Sources, Callable[[Path], Mapping[str, Path]]]:
    """Sources with both checkpoints at hand, and what quantises them.

    Nothing documents that TensorRT-LLM loads a quantised draft: it is one only if asked for.
    """
    options = replace(
        request.precision,
        precision=config.precision or "bf16",
        draft_precision=config.draft_precision or "bf16",
        exclude=config.exclude,
    )
    recipe = choose_recipe(config, path, options, engines=True)
    texts = find_texts(recipe, config, path, options.calibration)
    assert texts is not None
    target = _fetch(sources.target, path, "--target-checkpoint")
    draft = _fetch(sources.draft, path, "--draft-checkpoint")
    pair = check_pair(read_target(target), read_draft(draft))
    wanted = pair_quantization(recipe, pair, texts, quantize_lm_head=options.quantize_lm_head)
    planned = plan_quantization(pair, wanted)

    def quantize(folder: Path) -> Mapping[str, Path]:
        made = quantize_pair(planned, folder, output, progress)
        paths = {"target": made.target.checkpoint.path, "draft": made.draft.checkpoint.path}
        return {role: path for role, path in paths.items() if role in recipe.algorithms}

    if "target" in recipe.algorithms:
        sources = replace(sources, target=ModelSource(folder=target))
    if "draft" in recipe.algorithms:
        sources = replace(sources, draft=ModelSource(folder=draft))
    precision = {str(role): one.algorithm for role, one in recipe.algorithms.items()}
    return replace(sources, precision=precision), quantize


def _fetch(source: ModelSource, path: Path, option: str) -> Path:
    """The model's folder, downloaded where it is a name."""
    return source.folder or find_checkpoint(
        source.name or "", base=path.parent, revision=source.revision, option=option
    )

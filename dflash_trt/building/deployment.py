"""A TensorRT-LLM deployment of a pair, from a request to its folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from dflash_trt.building.bundle_writer import TOKENIZER_NAME
from dflash_trt.building.named_pair import takes_own_layer
from dflash_trt.building.profile import is_plain
from dflash_trt.building.quantize import (
    choose_precisions,
    find_texts,
    plan_quantization,
    quantize_pair,
)
from dflash_trt.building.sources import check_own_layer, fetch, find_source, read_shapes
from dflash_trt.building.spec import BuildSpec, DeploymentRequest
from dflash_trt.bundle.support import PRECISIONS, TRTLLM, PairFeature, check_executor
from dflash_trt.core.formats import QUANTIZED
from dflash_trt.core.progress import Progress
from dflash_trt.core.publish import check_destination
from dflash_trt.decoding.schedule import BlockSchedule
from dflash_trt.deploy.planning.known_pairs import PairShape
from dflash_trt.deploy.trtllm.arguments import ModelSource, Sources
from dflash_trt.deploy.trtllm.deployment_plan import (
    DeploymentOptions,
    DeploymentPlan,
    fit_batch,
    plan_deployment,
)
from dflash_trt.deploy.trtllm.deployment_record import DEPLOYMENT, Deployment
from dflash_trt.deploy.trtllm.deployment_writer import describe_deployment, write_deployment
from dflash_trt.deploy.trtllm.versions import DEFAULT_VERSION, find_version
from dflash_trt.errors import DflashError, one_line
from dflash_trt.models.build_config import BuildConfig
from dflash_trt.models.draft import DraftSpec, read_draft
from dflash_trt.models.pair_check import check_draft, check_pair
from dflash_trt.models.target import read_target


@dataclass(frozen=True, slots=True)
class BuiltDeployment:
    """A deployment's folder and record; `notes` are what its user should know besides."""

    folder: Path
    record: Deployment
    notes: tuple[str, ...]


def build_deployment(
    spec: BuildSpec, config: BuildConfig, path: Path, profile: str, progress: Progress
) -> BuiltDeployment:
    """Writes the deployment of the configuration `config`, read from `path`, on `profile`.

    Models stay names of the hub where neither a folder is given nor weights must be quantised:
    TensorRT-LLM downloads them itself.
    """
    options = spec.deployment
    output = spec.output or Path(f"{path.stem}-{profile}")
    check_destination(output, overwrite=spec.overwrite, kind=DEPLOYMENT)
    config = _planned_precision(config)
    quantizes = bool({config.precision, config.draft_precision} & set(QUANTIZED))
    given, draft = spec.checkpoints, None
    if not takes_own_layer(given, config):
        draft = find_source(config.draft, path, given.draft_checkpoint, "--draft-checkpoint")
    elif quantizes:
        what = "is quantised without its MTP layer here"
        raise DflashError(what, where=path, fix=PairFeature.QUANTIZING.fix, usage=True)
    sources = Sources(
        target=find_source(config.target, path, given.target_checkpoint, "--target-checkpoint"),
        draft=draft,
        precision={},
        drafting="mtp" if draft is None else "dflash",
    )
    if config.eagle3 is not None:
        eagle3 = find_source(config.eagle3, path, None, f"{path}, eagle3")
        sources = replace(sources, eagle3=eagle3, eagle3_draft_len=config.eagle3.max_draft_len)
    if spec.copy_weights and not quantizes and not sources.folders:
        raise DflashError(
            "does nothing where models stay names on the hub",
            where="--copy-weights",
            fix="pass --target-checkpoint or --draft-checkpoint, or leave it out",
            usage=True,
        )
    if not quantizes and sources.draft is not None and sources.draft.revision is not None:
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
    # A profile's own batch is what a draft with a context of its own leaves room for.
    fits_any = sources.draft is None or is_plain(profile, config.profiles[profile])
    if spec.limits.max_batch is None and fits_any:
        config = fit_batch(config, path, profile, pair, wanted)
    plan = plan_deployment(config, path, profile, pair, wanted)
    split = plan.options.cache_transceiver_config is not None
    sources = replace(sources, disaggregated=split)
    quantize = None
    if quantizes:
        describe_deployment(plan, sources)  # refuses what it must before anything is downloaded
        sources, quantize = _quantization(sources, config, path, spec, output, progress)
    else:
        choose_precisions(config, spec.precision, path, TRTLLM)
    record = write_deployment(
        plan,
        sources,
        output,
        progress,
        overwrite=spec.overwrite,
        copy_weights=spec.copy_weights,
        quantize=quantize,
    )
    return BuiltDeployment(output, record, tuple(_notes(options, plan, sources)))


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


def _planned_precision(config: BuildConfig) -> BuildConfig:
    """`config` as deployments see it: bf16 leaves the checkpoints alone.

    Raises:
        DflashError: a type that TensorRT-LLM does not run them in (usage).
    """
    if config.precision is None:
        return config
    check_executor(PRECISIONS[config.precision], TRTLLM, config.precision, where="--precision")
    return config.model_copy(update={"precision": None}) if config.precision == "bf16" else config


def _read_pair(sources: Sources, config: BuildConfig, path: Path) -> PairShape:
    """The pair's shapes; where there are folders, their weights must fit each other."""
    target = sources.target.folder
    if sources.draft is None:
        if target is not None:
            spec = read_target(target)
            check_own_layer(spec.sizes, f"of the family {spec.family}", target)
            check_pair(spec, read_draft(target))
        return read_shapes(sources.target, None, config, path)
    draft = sources.draft.folder
    if target is not None and draft is not None:
        check_pair(read_target(target), _read_draft(draft))
    pair = read_shapes(sources.target, sources.draft, config, path)
    if target is None and draft is not None:
        check_draft(_read_draft(draft), pair.target.sizes, pair.target.vocab_size, pair.name)
    return pair


def _read_draft(folder: Path) -> DraftSpec:
    draft = read_draft(folder)
    if draft.is_speculators:
        what = "is in speculators' layout, which nothing says that TensorRT-LLM reads"
        fix = "build it for another executor, or pass the draft in z-lab's layout"
        raise DflashError(what, where=folder, fix=fix, usage=True)
    return draft


def _quantization(
    sources: Sources,
    config: BuildConfig,
    path: Path,
    spec: BuildSpec,
    output: Path,
    progress: Progress,
) -> tuple[Sources, Callable[[Path], Mapping[str, Path]]]:
    """Sources with both checkpoints at hand, and what quantises them.

    Nothing documents that TensorRT-LLM loads a quantised draft: it is one only if asked for.
    """
    options = spec.precision
    unquantised = {
        key: "bf16" for key in ("precision", "draft_precision") if getattr(config, key) is None
    }
    config = config.model_copy(update=unquantised)
    _, algorithms, _ = choose_precisions(config, options, path, TRTLLM)
    texts = find_texts(config, path, options.calibration)
    target = fetch(sources.target, path, "--target-checkpoint")
    assert sources.draft is not None  # an MTP layer is refused before
    draft = fetch(sources.draft, path, "--draft-checkpoint")
    planned = plan_quantization(
        check_pair(read_target(target), read_draft(draft)),
        algorithms,
        texts,
        exclude=config.exclude,
        quantize_lm_head=options.quantize_lm_head,
    )

    def quantize(folder: Path) -> Mapping[str, Path]:
        made = quantize_pair(planned, folder, output, progress)
        paths = {"target": made.target.checkpoint.path, "draft": made.draft.checkpoint.path}
        return {role: path for role, path in paths.items() if role in algorithms}

    if "target" in algorithms:
        sources = replace(sources, target=ModelSource(folder=target))
    if "draft" in algorithms:
        sources = replace(sources, draft=ModelSource(folder=draft))
    precision = {str(role): one.algorithm for role, one in algorithms.items()}
    return replace(sources, precision=precision), quantize

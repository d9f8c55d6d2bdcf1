"""What a deployment is to be, checked before anything is written or downloaded."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from dflash_trt.bundle.memory.cache_bytes import KV_ITEM_BYTES
from dflash_trt.bundle.memory.gpu_layout import GpuLayout
from dflash_trt.bundle.memory.served import ServedMemory, plan_memory
from dflash_trt.core.formats import QUANTIZED, Format
from dflash_trt.core.limits import check_positions, choose_block
from dflash_trt.decoding.schedule import BlockSchedule
from dflash_trt.deploy.other_engines import SERVED
from dflash_trt.deploy.planning.known_pairs import PairShape
from dflash_trt.deploy.trtllm.deployment_rules import (
    bad_experts,
    choose_backend,
    refusal,
    refuse_first,
)
from dflash_trt.deploy.trtllm.llm_options import OPTION, LlmOptions, read_options
from dflash_trt.deploy.trtllm.schema import AttentionBackend
from dflash_trt.deploy.trtllm.versions import DEFAULT_VERSION, VERSIONS, Version
from dflash_trt.errors import DflashError
from dflash_trt.hardware.gpus import Gpu, find_gpu
from dflash_trt.models.build_config import BuildConfig, HardwareProfile
from dflash_trt.models.sizes import TargetShape

FIT_BATCHES = (1, 2, *range(4, 65, 4))
ALL_TOKENS = -1
"""`context_recompute_tail`: after a prefix-cache hit the drafter gets all of the prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentOptions:
    """What the command line says beside the configuration.

    Args:
        schedule: a file of `tune`; None drafts the same at any batch.
        backend: the draft's attention; None chooses by architecture.
        llm_args: NAME=VALUE, over the profile's own.
    """

    version: Version = VERSIONS[DEFAULT_VERSION]
    schedule: Path | None = None
    backend: AttentionBackend | None = None
    llm_args: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentPlan:
    """A deployment, checked; `name` is the configuration's.

    Args:
        where: what an error of its arguments names.
        max_draft_len: drafts of a step, block - 1.
        schedule: {batch up to: drafts}, None where it is always max_draft_len.
        options: LLM arguments beside the computed ones.
        backend: of the draft's attention; None where it is a layer of the target.
        recompute_tail: prompt tokens computed again at least after a prefix-cache hit, -1 is all
            of them; None where prefixes are not reused, since a hit would starve the drafter.
        chat_template_kwargs: of every chat, since the draft was trained so.
    """

    name: str
    where: str
    profile_name: str
    profile: HardwareProfile
    gpu: Gpu
    pair: PairShape
    version: Version
    max_batch: int
    max_seq_len: int
    max_draft_len: int
    schedule: dict[int, int] | None
    backend: AttentionBackend | None
    options: LlmOptions
    recompute_tail: int | None
    memory: ServedMemory
    chat_template_kwargs: dict[str, bool | str]

    @property
    def users(self) -> int:
        """Sequences at once on all GPUs."""
        data = self.profile.gpus if self.options.enable_attention_dp else 1
        return self.max_batch * data

    @property
    def whole_sequences(self) -> int:
        """Of max_seq_len tokens, at once; on each GPU where attention is split by data."""
        return min(self.max_batch, self.memory.users)

    @property
    def hardware(self) -> str:
        """As people say it: "8 × B300 (HGX)"."""
        return self.hardware_of(1)

    def hardware_of(self, servers: int) -> str:
        """The same for `servers` that each have the profile's GPUs."""
        return f"{self.profile.gpus * servers} × {self.gpu.title}"


def plan_deployment(
    config: BuildConfig,
    config_path: Path,
    profile_name: str,
    pair: PairShape,
    options: DeploymentOptions,
) -> DeploymentPlan:
    """Checks that `pair` can run on a profile's hardware as `config` and `options` say.

    The profile's limits count where `config` has them from it already. What TensorRT-LLM refuses of
    the arguments themselves `check_deployed` says.

    Raises:
        DflashError: a combination that does not fit (usage).
    """
    profile, target = config.profiles[profile_name], pair.target
    where = f"{config_path.name}, profile {profile_name}"
    try:
        gpu = find_gpu(profile.gpu)
    except DflashError as error:
        raise refusal(error.what, where, error.fix) from error
    _check_documented(pair, options.version, where)
    given = {
        OPTION: options.llm_args,
        "--attention-backend": options.backend,
        "--block-schedule": options.schedule,
    }
    named = " or ".join([*(name for name, value in given.items() if value), where])
    llm = read_options(profile.llm_args, named, options.llm_args)
    layout = GpuLayout(profile.gpus, "data" if llm.enable_attention_dp else "tensor")
    _check_parallelism(profile, layout, pair, named)
    _check_precision(config, gpu, target, where)
    pair = _as_quantized(pair, config)
    refuse_first(bad_experts(None, pair.target.experts_format, gpu), where)
    is_dspark, is_own = pair.draft.markov_rank > 0, pair.draft.fuses_token
    backend = options.backend or choose_backend(gpu.arch, is_dspark=is_dspark)
    if is_own and options.backend is not None:
        what = "an MTP layer's attention is the target's"
        raise refusal(what, "--attention-backend", "leave it out")
    trained, cache = pair.draft.block_size, llm.kv_cache_config
    block = choose_block(config.block_size, trained, where="--block-size")
    positions = min(target.max_position_embeddings, pair.draft.max_position_embeddings)
    check_positions(config.max_seq_len, positions, where)
    tail = llm.speculative_config.context_recompute_tail
    starves = target.has_windows or is_dspark or target.sizes.has_state
    if options.version.recomputes_tail and not starves and tail is None:
        tail = ALL_TOKENS
    return DeploymentPlan(
        name=config_path.stem,
        where=named,
        profile_name=profile_name,
        profile=profile,
        gpu=gpu,
        pair=pair,
        version=options.version,
        max_batch=config.max_batch,
        max_seq_len=config.max_seq_len,
        max_draft_len=block - 1,
        schedule=_read_schedule(options.schedule, config.max_batch),
        backend=None if is_own else backend,
        options=llm,
        recompute_tail=tail,
        memory=plan_memory(
            pair.target,
            pair.draft,
            gpu,
            layout,
            kv_item_bytes=1 if cache.dtype == "fp8" else KV_ITEM_BYTES,
            page_tokens=None if backend == "VANILLA" else cache.tokens_per_block,
            max_batch=config.max_batch,
            max_seq_len=config.max_seq_len,
            max_draft_len=block - 1,
            where=where,
        ),
        chat_template_kwargs=config.chat_template_kwargs,
    )


def fit_batch(
    config: BuildConfig,
    config_path: Path,
    profile_name: str,
    pair: PairShape,
    options: DeploymentOptions,
) -> BuildConfig:
    """`config` with the `max_batch` of FIT_BATCHES that holds the most whole sequences.

    Of those that hold equally many the largest: shorter sequences share. Unchanged where none fits.
    """
    most, best = 0, config
    for batch in FIT_BATCHES:
        resized = config.model_copy(update={"max_batch": batch})
        with suppress(DflashError):
            plan = plan_deployment(resized, config_path, profile_name, pair, options)
            if plan.whole_sequences >= most:
                most, best = plan.whole_sequences, resized
    return best


def _check_documented(pair: PairShape, version: Version, where: str) -> None:
    """Raises DflashError for a target and a draft that `version` does not document.

    Sources: the feature matrix of its supported models; pull requests 13782 (DFlash) and 12646
    (MTP) for dense hybrids, which all versions here have.
    """
    target, ways = pair.target, ["build it for --executor cpu or tensorrt-rtx"]
    unknown = "DFlash for Gemma 4" if target.sizes.has_full_heads else None
    if target.sizes.has_state and not pair.draft.fuses_token:
        if target.experts is not None:
            unknown = "DFlash for Qwen3.5's mixtures of experts"
        ways.append("pass --draft-checkpoint mtp")
    if pair.draft.dflash2 is not None:
        unknown = "DFlash 2"
        ways.append(f"serve it with {' or '.join(SERVED['DFlash 2'])}")
    if unknown is not None:
        fix = f"neither {' nor '.join(VERSIONS)} does; {', or '.join(ways)}"
        raise refusal(f"TensorRT-LLM documents no {unknown}", where, fix)
    if pair.drafter in version.lacks:
        others = [one.name for one in VERSIONS.values() if pair.drafter not in one.lacks]
        what = f"no page of TensorRT-LLM {version.name} documents {pair.drafter}"
        raise refusal(what, "--trtllm-version", f"choose {' or '.join(others)}")


def _check_parallelism(
    profile: HardwareProfile, layout: GpuLayout, pair: PairShape, where: str
) -> None:
    """Raises DflashError where a model cannot be split as `profile` says."""
    ways, experts = profile.expert_parallel or 1, pair.target.experts
    if experts is None and (ways > 1 or layout.attention == "data"):
        asked = f"expert_parallel {ways}" if ways > 1 else "enable_attention_dp"
        what = f"{asked} is for mixtures of experts; this target is dense"
        raise refusal(what, where, "leave it out")
    try:
        layout.check(pair.target, pair.draft)
    except DflashError as error:
        what = f"tensor_parallel {profile.tensor_parallel}: {error.what}"
        raise refusal(what, where) from error
    if experts is not None and experts.experts % ways:
        raise refusal(f"expert_parallel {ways} does not divide {experts.experts} experts", where)


def _check_precision(config: BuildConfig, gpu: Gpu, target: TargetShape, where: str) -> None:
    """Raises DflashError for formats that `gpu` does not multiply or that `target` is not to get.

    A target in fewer bits already is refused here, before it is downloaded.
    """
    for precision in (config.precision, config.draft_precision):
        if precision in QUANTIZED and precision not in gpu.formats:
            able = " or ".join(gpu.formats)
            fix = f"choose {able}" if able else "leave the checkpoint as it is"
            raise refusal(f"{gpu.title} ({gpu.arch}) does not multiply in {precision}", where, fix)
    if config.precision in QUANTIZED and target.mlp_format is not Format.BF16:
        fix = "leave out --precision"
        if target.mlp_format is Format.MXFP4:
            fix += (
                ", or convert its experts with `dflash-trt quantize` and pass --target-checkpoint"
            )
        raise refusal(f"the target is quantized already, in {target.mlp_format}", where, fix)


def _as_quantized(pair: PairShape, config: BuildConfig) -> PairShape:
    """The pair in the formats that its checkpoints are to be quantised to."""
    target, draft = pair.target, pair.draft
    if config.precision in QUANTIZED:
        target = target.in_format(Format(config.precision))
    if config.draft_precision in QUANTIZED:
        draft = draft.in_format(Format(config.draft_precision))
    return replace(pair, target=target, draft=draft)


def _read_schedule(path: Path | None, max_batch: int) -> dict[int, int] | None:
    """The file's schedule as TensorRT-LLM writes it, for batches up to `max_batch`."""
    if path is None:
        return None
    schedule = BlockSchedule.read(path)
    drafts = schedule.draft_len_schedule()
    if not drafts:
        fix = "deploy without --block-schedule, or the autoregressive variant"
        raise refusal("does without speculation at every batch", path, fix)
    # Its last range holds for all batches above it too; TensorRT-LLM's ends with its key.
    last = max(drafts)
    if schedule.blocks[-1].block_size > 1 and last < max_batch:
        drafts[max_batch] = drafts.pop(last)
    return drafts

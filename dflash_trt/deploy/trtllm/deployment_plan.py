"""What a deployment is to be, checked before anything is written or downloaded."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from dflash_trt.bundle.memory.cache_bytes import KV_ITEM_BYTES
from dflash_trt.bundle.memory.served import ServedMemory, plan_memory
from dflash_trt.core.formats import QUANTIZED, Format
from dflash_trt.core.limits import check_positions, choose_block
from dflash_trt.decoding.schedule import BlockSchedule
from dflash_trt.deploy.planning.known_pairs import PairShape
from dflash_trt.deploy.trtllm.deployment_rules import (
    check_backend,
    check_caches,
    check_documented,
    check_experts,
    check_parallelism,
    check_parser,
    check_precision,
    check_schedule,
    check_tail,
    check_unquantized,
    choose_backend,
    choose_dspark_backend,
    choose_layout,
    refusal,
)
from dflash_trt.deploy.trtllm.llm_options import OPTION, LlmOptions, read_options
from dflash_trt.deploy.trtllm.schema import AttentionBackend
from dflash_trt.deploy.trtllm.versions import Version
from dflash_trt.errors import DflashError
from dflash_trt.hardware.gpus import Gpu, find_gpu
from dflash_trt.models.build_config import BuildConfig, HardwareProfile

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

    version: Version
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
    backend: AttentionBackend
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
        return f"{self.profile.gpus} × {self.gpu.title}"


def plan_deployment(
    config: BuildConfig,
    config_path: Path,
    profile_name: str,
    pair: PairShape,
    options: DeploymentOptions,
) -> DeploymentPlan:
    """Checks that `pair` can run on a profile's hardware as `config` and `options` say.

    The profile's limits count where `config` has them from it already.

    Raises:
        DflashError: a combination that TensorRT-LLM refuses or that does not fit (usage).
    """
    profile = config.profiles[profile_name]
    where = f"{config_path.name}, profile {profile_name}"
    try:
        gpu = find_gpu(profile.gpu)
    except DflashError as error:
        raise refusal(error.what, where, error.fix) from error
    check_documented(pair.target, where)
    llm = read_options(profile.llm_args, f"{where}, llm_args", options.llm_args)
    given = [text.partition("=")[0] for text in options.llm_args]

    def setter(*names: str) -> str:
        """What an error of one of these arguments names: who set it."""
        is_given = any(one == name or name.startswith(f"{one}.") for name in names for one in given)
        return OPTION if is_given else where

    check_parallelism(profile, llm, pair, where, setter("enable_attention_dp"))
    for precision in (config.precision, config.draft_precision):
        if precision is not None:
            check_precision(precision, gpu, where)
    if config.precision in QUANTIZED:
        check_unquantized(pair.target, where)
    pair = _as_quantized(pair, config)
    moe = llm.moe_config.backend if "moe_config" in llm.model_fields_set else None
    ways = profile.expert_parallel or 1
    check_experts(
        moe, pair.target.experts_format, gpu, ways=ways, where=setter("moe_config.backend")
    )
    check_parser(llm.reasoning_parser, pair.architecture, setter("reasoning_parser"))
    is_dspark = pair.draft.markov_rank > 0
    backend = (
        choose_dspark_backend(options.backend, gpu.arch)
        if is_dspark
        else options.backend or choose_backend(gpu.arch)
    )
    check_backend(backend, gpu, "--attention-backend")
    cache = llm.kv_cache_config
    caches = setter("kv_cache_config.dtype", "kv_cache_config.tokens_per_block")
    check_caches(cache.dtype, cache.tokens_per_block, gpu, backend, config.max_seq_len, caches)
    trained = pair.draft.block_size
    block = choose_block(config.block_size, trained, where="--block-size")
    check_positions(
        config.max_seq_len,
        min(pair.target.max_position_embeddings, pair.draft.max_position_embeddings),
        where,
    )
    return DeploymentPlan(
        name=config_path.stem,
        where=f"{OPTION} or {where}" if given else where,
        profile_name=profile_name,
        profile=profile,
        gpu=gpu,
        pair=pair,
        version=options.version,
        max_batch=config.max_batch,
        max_seq_len=config.max_seq_len,
        max_draft_len=block - 1,
        schedule=_read_schedule(options.schedule, config.max_batch, block - 1),
        backend=backend,
        options=llm,
        recompute_tail=_choose_tail(
            options.version, llm, pair, setter("speculative_config.context_recompute_tail")
        ),
        memory=plan_memory(
            pair.target,
            pair.draft,
            gpu,
            choose_layout(profile, llm),
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


def _as_quantized(pair: PairShape, config: BuildConfig) -> PairShape:
    """The pair in the formats that its checkpoints are to be quantised to."""
    target, draft = pair.target, pair.draft
    if config.precision in QUANTIZED:
        target = target.in_format(Format(config.precision))
    if config.draft_precision in QUANTIZED:
        draft = draft.in_format(Format(config.draft_precision))
    return replace(pair, target=target, draft=draft)


def _read_schedule(path: Path | None, max_batch: int, longest: int) -> dict[int, int] | None:
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
    check_schedule(drafts, longest, str(path))
    return drafts


def _choose_tail(version: Version, options: LlmOptions, pair: PairShape, where: str) -> int | None:
    """See `DeploymentPlan.recompute_tail`."""
    asked, windows = options.speculative_config.context_recompute_tail, pair.target.has_windows
    dspark, recurrent = pair.draft.markov_rank > 0, pair.target.sizes.has_state
    reuses = version.recomputes_tail and not (windows or dspark or recurrent)
    tail = ALL_TOKENS if reuses and asked is None else asked
    check_tail(
        tail,
        reuses=reuses,
        version=version,
        windows=windows,
        where=where,
        dspark=dspark,
        recurrent=recurrent,
    )
    return tail

"""What a deployment is to be, checked before anything is written or downloaded."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from dflash_trt.checkpoints.draft import DraftSpec
from dflash_trt.config import QUANTIZED, BuildConfig, HardwareProfile
from dflash_trt.errors import DflashError
from dflash_trt.hardware.gpu import Gpu
from dflash_trt.hardware.table import find_gpu
from dflash_trt.planning.known_pairs import PairShape
from dflash_trt.speculation.schedule import BlockSchedule
from dflash_trt.trtllm.memory import MemoryBudget, plan_memory
from dflash_trt.trtllm.rules import (
    check_backend,
    check_parallelism,
    check_precision,
    check_schedule,
    check_unquantized,
    choose_backend,
)
from dflash_trt.trtllm.schema import AttentionBackend
from dflash_trt.trtllm.versions import Version

ALL_TOKENS = -1
"""`context_recompute_tail`: after a prefix-cache hit the drafter gets all of the prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentOptions:
    """What the command line says beside the configuration.

    Args:
        version: of TensorRT-LLM.
        schedule: a file of `tune`; None drafts the same at any batch.
        backend: the draft's attention; None chooses by architecture.
        recompute_tail: prompt tokens computed again at least after a prefix-cache hit; None is
            all of them. Only versions that have it.
    """

    version: Version
    schedule: Path | None = None
    backend: AttentionBackend | None = None
    recompute_tail: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentPlan:
    """A deployment, checked.

    Args:
        name, profile_name: of the configuration and of its hardware.
        max_draft_len: drafts of a step, block - 1.
        schedule: {batch up to: drafts}, None where it is always max_draft_len.
        recompute_tail: None where the version has none.
    """

    name: str
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
    recompute_tail: int | None
    memory: MemoryBudget

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
        raise DflashError(error.what, where=where, fix=error.fix, usage=True) from error
    check_parallelism(profile, pair, where)
    for precision in (config.precision, config.draft_precision):
        if precision is not None:
            check_precision(precision, gpu, where)
    if config.precision in QUANTIZED:
        check_unquantized(pair.target, where)
    pair = _as_quantized(pair, config)
    backend = options.backend or choose_backend(gpu.arch)
    check_backend(backend, gpu, "--attention-backend")
    block = _check_block(config.block_size, pair.draft.block_size)
    longest = min(pair.target.max_context, pair.draft.model.max_context)
    if config.max_seq_len > longest:
        raise DflashError(
            f"max_seq_len {config.max_seq_len} exceeds the {longest} positions that the pair was "
            "trained for",
            where=where,
            fix=f"pass --max-seq-len {longest} or less",
            usage=True,
        )
    schedule = None
    if options.schedule is not None:
        schedule = _read_schedule(options.schedule, config.max_batch, block - 1)
    return DeploymentPlan(
        name=config_path.stem,
        profile_name=profile_name,
        profile=profile,
        gpu=gpu,
        pair=pair,
        version=options.version,
        max_batch=config.max_batch,
        max_seq_len=config.max_seq_len,
        max_draft_len=block - 1,
        schedule=schedule,
        backend=backend,
        recompute_tail=_check_tail(options),
        memory=plan_memory(
            pair, gpu, profile.gpus, backend, config.max_batch, config.max_seq_len, where
        ),
    )


def check_draft(draft: DraftSpec, pair: PairShape) -> None:
    """Refuses a draft of another target than the one whose shape is known.

    For where the target's checkpoint is not at hand; `checkpoints.pair` compares two that are.

    Raises:
        DflashError: says what does not fit.
    """
    target = pair.target
    problems = []
    if draft.num_target_layers not in (None, target.layers):
        problems.append(f"num_target_layers {draft.num_target_layers}, not {target.layers}")
    if max(draft.target_layer_ids) >= target.layers:
        problems.append(f"taps layer {max(draft.target_layer_ids)} of {target.layers}")
    taps = len(draft.target_layer_ids)
    if draft.fc_input_size != taps * target.hidden:
        problems.append(
            f"fc takes {draft.fc_input_size} features, {taps} tapped layers of {target.hidden} "
            f"give {taps * target.hidden}"
        )
    if draft.mask_token_id >= target.vocab:
        problems.append(f"mask_token_id {draft.mask_token_id} of {target.vocab} tokens")
    if problems:
        raise DflashError(
            f"is no draft of {pair.name}: {', '.join(problems)}",
            where=draft.checkpoint.path,
            fix="pass the draft that was trained for this target",
        )


def _as_quantized(pair: PairShape, config: BuildConfig) -> PairShape:
    """The pair in the formats that its checkpoints are to be quantised to."""
    target, draft = pair.target, pair.draft
    if config.precision in ("fp8", "nvfp4"):
        target = target.in_format(config.precision)
    if config.draft_precision in ("fp8", "nvfp4"):
        draft = replace(draft, model=draft.model.in_format(config.draft_precision))
    return replace(pair, target=target, draft=draft)


def _check_block(wanted: int | None, trained: int) -> int:
    block = wanted or trained
    if block > trained:
        raise DflashError(
            f"block {block} is max_draft_len {block - 1}, and the draft was trained with a block "
            f"of {trained}",
            where="--block-size",
            fix=f"pass {trained} or less",
            usage=True,
        )
    return block


def _read_schedule(path: Path, max_batch: int, longest: int) -> dict[int, int]:
    """The file's schedule as TensorRT-LLM writes it, for batches up to `max_batch`."""
    schedule = BlockSchedule.read(path)
    drafts = schedule.draft_len_schedule()
    if not drafts:
        raise DflashError(
            "does without speculation at every batch",
            where=path,
            fix="deploy without --block-schedule, or the autoregressive variant",
            usage=True,
        )
    # Its last range holds for all batches above it too; TensorRT-LLM's ends with its key.
    last = max(drafts)
    if schedule.blocks[-1].block_size > 1 and last < max_batch:
        drafts[max_batch] = drafts.pop(last)
    check_schedule(drafts, longest, str(path))
    return drafts


def _check_tail(options: DeploymentOptions) -> int | None:
    if options.version.recomputes_tail:
        return ALL_TOKENS if options.recompute_tail is None else options.recompute_tail
    if options.recompute_tail is not None:
        raise DflashError(
            f"TensorRT-LLM {options.version.name} has no context_recompute_tail",
            where="--context-recompute-tail",
            fix="leave it out: prefixes are not reused then",
            usage=True,
        )
    return None

"""What TensorRT-LLM would refuse only once the GPUs wait for it, or would compute wrongly."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import cast

from dflash_trt.bundle.memory.gpu_layout import GpuLayout
from dflash_trt.core.formats import QUANTIZED, Format
from dflash_trt.deploy.planning.known_pairs import PairShape
from dflash_trt.deploy.trtllm.llm_options import LlmOptions
from dflash_trt.deploy.trtllm.schema import AttentionBackend, BlockDrafts, DSparkBackend, MoeBackend
from dflash_trt.deploy.trtllm.trtllm_kernels import (
    CUTEDSL_ALONE,
    REASONING_PARSERS,
    TRTLLM_PAGES,
    default_moe_backend,
    moe_backends,
)
from dflash_trt.deploy.trtllm.versions import VERSIONS, Version
from dflash_trt.errors import DflashError
from dflash_trt.hardware.gpus import Gpu, arches
from dflash_trt.models.build_config import HardwareProfile
from dflash_trt.models.sizes import TargetShape


def refusal(what: str, where: str | Path, fix: str | None = None) -> DflashError:
    """The error of a deployment that cannot be: always one of usage."""
    return DflashError(what, where=where, fix=fix, usage=True)


def check_documented(target: TargetShape, where: str) -> None:
    """Raises DflashError for a target with which no known version documents DFlash.

    Sources: the feature matrix of its supported models; pull request 13782 for dense hybrids, which
    both versions here have.
    """
    family = None
    if target.sizes.has_state and target.experts is not None:
        family = "Qwen3.5's mixtures of experts"
    elif target.sizes.has_full_heads:
        family = "Gemma 4"
    if family is None:
        return
    what = f"TensorRT-LLM documents no DFlash for {family}"
    versions = " nor ".join(VERSIONS)
    raise refusal(
        what, where, f"neither {versions} does; build it for --executor cpu or tensorrt-rtx"
    )


def choose_backend(arch: str) -> AttentionBackend:
    """The draft's attention backend for GPUs of `arch`."""
    return cast(AttentionBackend, arches()[arch].draft_attention)


def choose_dspark_backend(asked: AttentionBackend | None, arch: str) -> AttentionBackend:
    """A DSpark draft's attention backend: VANILLA where GPUs of `arch` have none of its others."""
    if asked == "FA4":
        what = "TensorRT-LLM documents attention backend FA4 for DFlash, not for DSpark"
        raise refusal(what, "--attention-backend", "choose VANILLA or TRTLLM")
    if asked is not None:
        return asked
    return "TRTLLM" if choose_backend(arch) == "TRTLLM" else "VANILLA"


def check_backend(backend: AttentionBackend | DSparkBackend, gpu: Gpu, where: str) -> None:
    """Raises DflashError where `gpu` has no kernels for the draft's attention backend."""
    if backend == "AUTO":
        return
    if backend == "CUTEDSL":
        what = "which GPUs attention backend CUTEDSL runs on is not documented"
        raise refusal(what, where, f"choose {choose_dspark_backend(None, gpu.arch)}")
    able = [arch.name for arch in arches().values() if arch.draft_attention == backend]
    if backend != "VANILLA" and gpu.arch not in able:
        what = f"attention backend {backend} does not run on {gpu.title} ({gpu.arch})"
        what += f": TensorRT-LLM has it for {' and '.join(able)}"
        raise refusal(what, where, f"choose {choose_backend(gpu.arch)}")


def check_draft_length(speculation: BlockDrafts, trained_block: int, where: str) -> None:
    """Raises DflashError for draft lengths that the draft was not trained for.

    `max_draft_len` K drafts are a block of K + 1; the schedule's smallest batch drafts K.
    """
    longest = speculation.max_draft_len
    if longest is None or longest < 1:
        raise refusal("max_draft_len is missing or 0", where)
    if longest >= trained_block:
        what = f"max_draft_len {longest} needs a block of {longest + 1}"
        fix = f"at most {trained_block - 1} (a block of {trained_block})"
        raise refusal(f"{what}, the draft was trained with {trained_block}", where, fix)
    if speculation.draft_len_schedule:
        check_schedule(speculation.draft_len_schedule, longest, where)


def check_feeding(speculation: BlockDrafts, where: str) -> None:
    """Raises DflashError unless the layers and the mask token that feed the drafter are stated.

    TensorRT-LLM looks for them in the draft's config.json only where the draft is a folder; without
    them the drafter gets no context, and almost nothing that it drafts is accepted.
    """
    for name in ("target_layer_ids", "mask_token_id"):
        if getattr(speculation, name) is None:
            fix = "write it as the draft's config.json has it"
            raise refusal(f"speculative_config.{name} is missing", where, fix)


def check_tail(
    tail: int | None,
    *,
    reuses: bool,
    version: Version,
    windows: bool,
    where: str,
    dspark: bool = False,
    recurrent: bool = False,
) -> None:
    """Raises DflashError where a prefix-cache hit would starve the drafter.

    Where layers of the target see a window, TensorRT-LLM's first KV cache manager does not compute
    a prefix again: pages outside of the window are gone.

    Args:
        tail: `context_recompute_tail`, None where it is left out.
        reuses: whether the KV cache hands out known prefixes.
        windows: whether the target has layers with sliding windows.
        dspark: whether the draft is DSpark's, of which no version documents that it is fed again.
        recurrent: whether the target has recurrent layers: the same, since their state would have
            to be that of the tail's beginning.
    """
    able = version.recomputes_tail and not (windows or dspark or recurrent)
    if able and reuses and not tail:
        what = "context_recompute_tail 0 leaves a drafter without the prompts that are known"
        raise refusal(what, where, "pass 2048, say")
    if able or (tail is None and not reuses):
        return
    what = f"TensorRT-LLM {version.name} has no context_recompute_tail"
    if dspark:
        what = "DSpark has no context_recompute_tail"
    elif recurrent:
        what = "a target with recurrent layers does not take context_recompute_tail"
    elif version.recomputes_tail:
        what = "a target with sliding windows does not take context_recompute_tail"
    fix = "leave it out: prefixes are not reused then"
    if tail is None:
        what, fix = (
            f"{what}, so a reused prefix starves the drafter",
            "set enable_block_reuse false",
        )
    raise refusal(what, where, fix)


def check_schedule(schedule: Mapping[int, int], longest: int, where: str) -> None:
    """Raises DflashError unless the schedule begins with `longest` and never asks for more."""
    first = schedule[min(schedule)]
    if first != longest:
        what = f"the schedule begins with {first} drafts (block {first + 1})"
        fix = f"pass --block-size {first + 1}, or tune again with block {longest + 1}"
        raise refusal(f"{what}, max_draft_len is {longest}", where, fix)
    most = max(schedule.values())
    if most > longest:
        what = f"the schedule asks for {most} drafts, max_draft_len is {longest}"
        raise refusal(what, where)


def choose_layout(profile: HardwareProfile, options: LlmOptions) -> GpuLayout:
    """How the models lie on the profile's GPUs."""
    return GpuLayout(profile.gpus, "data" if options.enable_attention_dp else "tensor")


def check_parallelism(
    profile: HardwareProfile, options: LlmOptions, pair: PairShape, where: str, option: str
) -> None:
    """Raises DflashError where a model cannot be split as `profile` says.

    `option` is what an error of `enable_attention_dp` names.
    """
    ways, experts = profile.expert_parallel, pair.target.experts
    if options.enable_attention_dp:
        if experts is None:
            what = "enable_attention_dp is for mixtures of experts; this target is dense"
            raise refusal(what, option, "leave it out")
        if profile.gpus == 1:
            raise refusal("enable_attention_dp is for several GPUs", option, "leave it out")
        if ways != profile.gpus:
            what = f"enable_attention_dp deals out whole experts over all {profile.gpus} GPUs"
            raise refusal(what, option, f"set expert_parallel {profile.gpus} in the profile")
    try:
        choose_layout(profile, options).check(pair.target, pair.draft)
    except DflashError as error:
        what = f"tensor_parallel {profile.tensor_parallel}: {error.what}"
        raise refusal(what, where) from error
    if ways is not None and ways > 1 and experts is None:
        what = f"expert_parallel {ways} is for mixtures of experts; this target is dense"
        raise refusal(what, where, "leave it out")
    if ways is not None and experts is not None and experts.experts % ways:
        raise refusal(f"expert_parallel {ways} does not divide {experts.experts} experts", where)


def check_precision(precision: str, gpu: Gpu, where: str) -> None:
    """Raises DflashError for a quantised precision that `gpu`'s tensor cores do not multiply."""
    if precision in QUANTIZED and precision not in gpu.formats:
        able = " or ".join(gpu.formats)
        fix = f"choose {able}" if able else "leave the checkpoint as it is"
        raise refusal(f"{gpu.title} ({gpu.arch}) does not multiply in {precision}", where, fix)


def check_unquantized(target: TargetShape, where: str) -> None:
    """Raises DflashError for a target in fewer bits already: before it is downloaded."""
    if target.mlp_format is Format.BF16:
        return
    fix = "leave out --precision"
    if target.mlp_format is Format.MXFP4:
        fix += ", or convert its experts with `dflash-trt quantize` and pass --target-checkpoint"
    raise refusal(f"the target is quantized already, in {target.mlp_format}", where, fix)


def check_experts(
    asked: MoeBackend | None, experts: Format | None, gpu: Gpu, *, ways: int, where: str
) -> None:
    """Raises DflashError where TensorRT-LLM cannot multiply the target's experts as asked.

    Args:
        asked: `moe_config.backend`, None where there is no moe_config.
        experts: what they are stored in, None for a dense target.
        ways: GPUs that whole experts are dealt out to.
    """
    if experts is None:
        if asked is not None:
            what = f"moe_config.backend {asked} is for mixtures of experts; this target is dense"
            raise refusal(what, where, "leave it out")
        return
    asked = asked or "AUTO"
    backend = default_moe_backend(experts, gpu.arch) if asked == "AUTO" else asked
    able = moe_backends(experts, gpu.arch)
    if backend not in able:
        on = f"experts in {experts} on {gpu.title} ({gpu.arch})"
        if not able:
            raise refusal(f"TensorRT-LLM multiplies no {on}", where, "choose another GPU")
        what = f"moe_config.backend {asked} multiplies no {on}"
        raise refusal(what, where, f"choose {' or '.join(able)}")
    if asked == "CUTEDSL" and gpu.arch in CUTEDSL_ALONE and ways > 1:
        what = f"moe_config.backend CUTEDSL on {gpu.title} ({gpu.arch}) splits no experts"
        raise refusal(what, where, "choose CUTLASS, or leave out expert_parallel")


def check_caches(
    dtype: str, page: int, gpu: Gpu, backend: str | None, max_seq_len: int, where: str
) -> None:
    """Raises DflashError for a KV cache, in pages of `page` tokens, that nothing reads."""
    what, fix = None, "leave it out"
    if dtype == "nvfp4":
        what = "kv_cache_config.dtype nvfp4 needs a checkpoint that ModelOpt gave scales for it"
        fix += ": auto follows the checkpoint"
    elif dtype == "fp8" and gpu.fp8 is None:
        what = f"kv_cache_config.dtype fp8: {gpu.title} ({gpu.arch}) has no FP8 attention"
    elif backend == "TRTLLM" and page not in TRTLLM_PAGES:
        what = f"attention backend TRTLLM has no pages of {page} tokens (tokens_per_block)"
        fix = f"choose {', '.join(map(str, TRTLLM_PAGES))}"
    elif page > max_seq_len:
        what = f"max_seq_len {max_seq_len} is less than a page of {page} tokens (tokens_per_block)"
        fix = "raise max_seq_len, or lower tokens_per_block"
    if what is not None:
        raise refusal(what, where, fix)


def check_parser(asked: str | None, architecture: str | None, where: str) -> None:
    """Raises DflashError for a reasoning parser of another family than the target's."""
    known = REASONING_PARSERS.get(architecture or "")
    if asked is None or known is None or asked in known:
        return
    fix = f"choose {' or '.join(known)}" if known else "leave it out"
    raise refusal(f"reasoning_parser {asked} is not of {architecture}", where, fix)

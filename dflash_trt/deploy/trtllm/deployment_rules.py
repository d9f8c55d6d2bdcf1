"""What TensorRT-LLM would refuse only once the GPUs wait for it, or would compute wrongly."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from dflash_trt.core.formats import Format
from dflash_trt.core.validation import validate
from dflash_trt.core.yaml_files import read_yaml
from dflash_trt.deploy.trtllm.deployment_record import ROUTER_FILE, Deployment, yaml_files
from dflash_trt.deploy.trtllm.schema import (
    AnyMoeBackend,
    Arguments,
    AttentionBackend,
    BlockDrafts,
    DSparkConfig,
    KvCache,
    MtpConfig,
    Router,
    check_arguments,
)
from dflash_trt.deploy.trtllm.trtllm_kernels import (
    CUTEDSL_ALONE,
    REASONING_PARSERS,
    TRTLLM_PAGES,
    default_moe_backend,
    moe_backends,
)
from dflash_trt.deploy.trtllm.versions import find_version
from dflash_trt.errors import DflashError
from dflash_trt.hardware.gpus import Gpu, arches, find_gpu

Mistakes = Iterator[tuple[str, str | None]]
"""What is wrong, and how to mend it."""


def refusal(what: str, where: str | Path, fix: str | None = None) -> DflashError:
    """The error of a deployment that cannot be: always one of usage."""
    return DflashError(what, where=where, fix=fix, usage=True)


def refuse_first(mistakes: Iterable[tuple[str, str | None]], where: str | Path) -> None:
    """Raises the first of `mistakes`, if there is any, as a DflashError."""
    for what, fix in mistakes:
        raise refusal(what, where, fix)


def check_deployment(folder: Path, deployment: Deployment) -> int:
    """Checks the YAML files in `folder`, which may have been edited; returns how many there are.

    Raises:
        DflashError: see `check_deployed`.
    """
    paths = [folder / name for variant in deployment.variants for name in yaml_files(variant)]
    checked = {
        path: check_deployed(read_yaml(path, within=folder), deployment, path) for path in paths
    }
    if "disaggregated" in deployment.variants:
        context, generation = (folder / name for name in yaml_files("disaggregated"))
        refuse_first(_unlike_halves(checked[context], checked[generation]), generation)
        paths.append(folder / ROUTER_FILE)
        validate(Router, read_yaml(paths[-1], within=folder), paths[-1], usage=True)
    return len(paths)


def check_deployed(
    values: Mapping[str, Any], deployment: Deployment, where: str | Path
) -> Arguments:
    """Checks the LLM arguments of one variant of `deployment`; returns them.

    Raises:
        DflashError: a field or a value that the version does not take, what does not go with draft,
            target or GPU, other GPUs or more sequences and tokens than memory was counted for.
    """
    arguments = check_arguments(values, find_version(deployment.tensorrt_llm), where)
    refuse_first(_mistakes(arguments, deployment, find_gpu(deployment.profile.gpu)), where)
    return arguments


def _unlike_halves(context: Arguments, generation: Arguments) -> Mistakes:
    """Caches that the generation server cannot take over from the context server."""
    fix = "write the same into both files"
    if (sends := context.cache_transceiver_config) is None or (
        sends != generation.cache_transceiver_config
    ):
        yield "cache_transceiver_config is missing, or not the context server's", fix
    caches = [one.kv_cache_config or KvCache() for one in (context, generation)]
    for name in ("dtype", "tokens_per_block"):
        first, second = (getattr(cache, name) for cache in caches)
        if first != second:
            yield f"kv_cache_config.{name} {second} is not the context server's {first}", fix


def _mistakes(arguments: Arguments, deployment: Deployment, gpu: Gpu) -> Mistakes:
    yield from _uncounted(arguments, deployment)
    drafts, backend = arguments.speculative_config, None
    if isinstance(drafts, BlockDrafts | MtpConfig):
        yield from _unlike_trained(drafts, deployment)
    if isinstance(drafts, BlockDrafts):
        backend = drafts.attention_backend
        yield from _without_kernels(backend, gpu)
        yield from _starving(arguments, drafts, deployment)
    if arguments.cache_transceiver_config is not None and deployment.recurrent:
        what = "cache_transceiver_config: which versions hand recurrent states over is undocumented"
        yield what, "leave it out"
    yield from _bad_caches(arguments, deployment.max_seq_len, gpu, backend)
    moe, ways = arguments.moe_config, arguments.moe_expert_parallel_size or 1
    yield from bad_experts(None if moe is None else moe.backend, deployment.experts, gpu, ways)
    asked, known = arguments.reasoning_parser, REASONING_PARSERS.get(deployment.architecture or "")
    if asked is not None and known is not None and asked not in known:
        fix = f"choose {' or '.join(known)}" if known else "leave it out"
        yield f"reasoning_parser {asked} is not of {deployment.architecture}", fix


def _uncounted(arguments: Arguments, deployment: Deployment) -> Mistakes:
    """Other GPUs, or more on them, than memory was counted for."""
    profile, fix = deployment.profile, "build the deployment again for that"
    exact = {
        "tensor_parallel_size": profile.tensor_parallel,
        "pipeline_parallel_size": 1,
        "moe_expert_parallel_size": profile.expert_parallel,
        "enable_attention_dp": deployment.llm_args.get("enable_attention_dp", False),
    }
    for name, counted in exact.items():
        if (found := getattr(arguments, name)) != counted:
            yield f"{name} {found} is not {counted}, as the profile has it", fix
    on_node, asked = profile.gpus // profile.nodes, arguments.gpus_per_node
    if asked != on_node and (profile.nodes > 1 or asked is not None):
        yield f"gpus_per_node {asked or 'missing'} is not {on_node}, as the profile has it", fix
    for name in ("max_batch_size", "max_seq_len"):
        counted = getattr(deployment, name.removesuffix("_size"))
        if (found := getattr(arguments, name)) is None or found > counted:
            yield f"{name} {found or 'missing'}: memory was counted for {counted}", fix


def _unlike_trained(drafts: BlockDrafts | MtpConfig, deployment: Deployment) -> Mistakes:
    """What the draft was not trained for, would draft blindly without, or has no memory for.

    `max_draft_len` K drafts are a block of K + 1; the schedule's smallest batch drafts K. Recurrent
    states are kept of as many rows. TensorRT-LLM looks for what feeds the drafter in the draft's
    config.json only where that is a folder; without it almost nothing that it drafts is accepted.
    """
    for name in ("target_layer_ids", "mask_token_id"):
        if getattr(drafts, name, "none of MTP's") is None:
            fix = "write it as the draft's config.json has it"
            yield f"speculative_config.{name} is missing", fix
    longest = drafts.max_draft_len
    if not longest:
        yield "max_draft_len is missing or 0", None
        return
    trained, counted = deployment.trained_block, deployment.max_draft_len
    if deployment.recurrent and longest > counted:
        what = f"max_draft_len {longest}: memory was counted for {counted}"
        yield what, "build the deployment again for that"
    elif longest >= trained:
        what = f"max_draft_len {longest} needs a block of {longest + 1}"
        fix = f"at most {trained - 1} (a block of {trained})"
        yield f"{what}, the draft was trained with {trained}", fix
    schedule = drafts.draft_len_schedule or {1: longest}
    first, most = schedule[min(schedule)], max(schedule.values())
    if first != longest:
        what = f"the schedule begins with {first} drafts (block {first + 1})"
        fix = f"pass --block-size {first + 1}, or tune again with block {longest + 1}"
        yield f"{what}, max_draft_len is {longest}", fix
    if most > longest:
        yield f"the schedule asks for {most} drafts, max_draft_len is {longest}", None


def _without_kernels(backend: str, gpu: Gpu) -> Mistakes:
    """A backend of the draft's attention that `gpu` has no kernels for."""
    if backend == "CUTEDSL":
        yield (
            "which GPUs attention backend CUTEDSL runs on is not documented",
            f"choose {choose_backend(gpu.arch, is_dspark=True)}",
        )
    able = [arch.name for arch in arches().values() if arch.draft_attention == backend]
    if backend not in ("AUTO", "VANILLA") and gpu.arch not in able:
        what = f"attention backend {backend} does not run on {gpu.title} ({gpu.arch})"
        what += f": TensorRT-LLM has it for {' and '.join(able)}"
        yield what, f"choose {choose_backend(gpu.arch)}"


def choose_backend(arch: str, *, is_dspark: bool = False) -> AttentionBackend:
    """The draft's attention backend for GPUs of `arch`; DSpark's has no FA4."""
    best = cast(AttentionBackend, arches()[arch].draft_attention)
    return "VANILLA" if is_dspark and best == "FA4" else best


def _starving(arguments: Arguments, drafts: BlockDrafts, deployment: Deployment) -> Mistakes:
    """A prefix-cache hit that leaves the drafter without the context of what is known.

    No version documents that DSpark's drafter is fed again. Where layers of the target see a
    window, TensorRT-LLM's first KV cache manager does not compute a prefix again: pages outside of
    the window are gone. A recurrent state would have to be that of the tail's beginning.
    """
    reuses = (arguments.kv_cache_config or KvCache()).enable_block_reuse
    why, tail = None, getattr(drafts, "context_recompute_tail", None)
    if isinstance(drafts, DSparkConfig):
        why = "DSpark has no context_recompute_tail"
    elif deployment.recurrent:
        why = "a target with recurrent layers does not take context_recompute_tail"
    elif not find_version(deployment.tensorrt_llm).recomputes_tail:
        why = f"TensorRT-LLM {deployment.tensorrt_llm} has no context_recompute_tail"
    elif deployment.windows:
        why = "a target with sliding windows does not take context_recompute_tail"
    if why is None and reuses and not tail:
        what = "context_recompute_tail 0 leaves a drafter without the prompts that are known"
        yield what, "pass 2048, say"
    elif why is not None and tail is not None:
        yield why, "leave it out: prefixes are not reused then"
    elif why is not None and reuses:
        yield f"{why}, so a reused prefix starves the drafter", "set enable_block_reuse false"


def bad_experts(
    asked: AnyMoeBackend | None, experts: Format | None, gpu: Gpu, ways: int = 1
) -> Mistakes:
    """Yields why TensorRT-LLM cannot multiply the target's experts as asked.

    Args:
        asked: `moe_config.backend`, None where there is no moe_config.
        experts: what they are stored in, None for a dense target.
        ways: GPUs that whole experts are dealt out to.
    """
    if experts is None:
        if asked is not None:
            what = f"moe_config.backend {asked} is for mixtures of experts; this target is dense"
            yield what, "leave it out"
        return
    asked = asked or "AUTO"
    backend = default_moe_backend(experts, gpu.arch) if asked == "AUTO" else asked
    able = moe_backends(experts, gpu.arch)
    if backend not in able:
        on = f"experts in {experts} on {gpu.title} ({gpu.arch})"
        if not able:
            yield f"TensorRT-LLM multiplies no {on}", "choose another GPU"
        yield f"moe_config.backend {asked} multiplies no {on}", f"choose {' or '.join(able)}"
    if asked == "CUTEDSL" and gpu.arch in CUTEDSL_ALONE and ways > 1:
        what = f"moe_config.backend CUTEDSL on {gpu.title} ({gpu.arch}) splits no experts"
        yield what, "choose CUTLASS, or leave out expert_parallel"


def _bad_caches(arguments: Arguments, max_seq_len: int, gpu: Gpu, backend: str | None) -> Mistakes:
    """A KV cache that nothing reads."""
    cache = arguments.kv_cache_config or KvCache()
    page = cache.tokens_per_block
    if cache.dtype == "nvfp4":
        what = "kv_cache_config.dtype nvfp4 needs a checkpoint that ModelOpt gave scales for it"
        yield what, "leave it out: auto follows the checkpoint"
    if cache.dtype == "fp8" and gpu.fp8 is None:
        what = f"kv_cache_config.dtype fp8: {gpu.title} ({gpu.arch}) has no FP8 attention"
        yield what, "leave it out"
    if backend == "TRTLLM" and page not in TRTLLM_PAGES:
        what = f"attention backend TRTLLM has no pages of {page} tokens (tokens_per_block)"
        yield what, f"choose {', '.join(map(str, TRTLLM_PAGES))}"
    if page > max_seq_len:
        what = f"max_seq_len {max_seq_len} is less than a page of {page} tokens (tokens_per_block)"
        yield what, "raise max_seq_len, or lower tokens_per_block"

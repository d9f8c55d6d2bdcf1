"""What TensorRT-LLM would refuse only once the GPUs wait for it, or run wrongly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from dflash_trt.config import QUANTIZED, HardwareProfile
from dflash_trt.errors import DflashError
from dflash_trt.hardware.gpu import Gpu
from dflash_trt.hardware.table import arches
from dflash_trt.memory.gpus import GpuLayout
from dflash_trt.memory.shape import ModelShape
from dflash_trt.planning.known_pairs import PairShape
from dflash_trt.trtllm.schema import AttentionBackend, DFlashConfig


def choose_backend(arch: str) -> AttentionBackend:
    """The draft's attention backend for GPUs of `arch`."""
    return cast(AttentionBackend, arches()[arch].draft_attention)


def check_backend(backend: AttentionBackend, gpu: Gpu, where: str) -> None:
    """Raises DflashError where `gpu` has no kernels for the draft's attention backend."""
    able = [arch.name for arch in arches().values() if arch.draft_attention == backend]
    if backend != "VANILLA" and gpu.arch not in able:
        raise DflashError(
            f"attention backend {backend} does not run on {gpu.title} ({gpu.arch}): TensorRT-LLM "
            f"has it for {' and '.join(able)}",
            where=where,
            fix=f"choose {choose_backend(gpu.arch)}",
            usage=True,
        )


def check_draft_length(speculation: DFlashConfig, trained_block: int, where: str) -> None:
    """Raises DflashError for draft lengths that the draft was not trained for.

    `max_draft_len` K drafts are a block of K + 1; the schedule's smallest batch drafts K.
    """
    longest = speculation.max_draft_len
    if longest is None or longest < 1:
        raise DflashError("max_draft_len is missing or 0", where=where, usage=True)
    if longest >= trained_block:
        raise DflashError(
            f"max_draft_len {longest} needs a block of {longest + 1}, the draft was trained with "
            f"{trained_block}",
            where=where,
            fix=f"at most {trained_block - 1} (a block of {trained_block})",
            usage=True,
        )
    if speculation.draft_len_schedule:
        check_schedule(speculation.draft_len_schedule, longest, where)


def check_schedule(schedule: Mapping[int, int], longest: int, where: str) -> None:
    """Raises DflashError unless the schedule begins with `longest` and never asks for more."""
    first = schedule[min(schedule)]
    if first != longest:
        raise DflashError(
            f"the schedule begins with {first} drafts (block {first + 1}), max_draft_len is "
            f"{longest}",
            where=where,
            fix=f"pass --block-size {first + 1}, or tune again with block {longest + 1}",
            usage=True,
        )
    if max(schedule.values()) > longest:
        raise DflashError(
            f"the schedule asks for {max(schedule.values())} drafts, max_draft_len is {longest}",
            where=where,
            usage=True,
        )


def check_parallelism(profile: HardwareProfile, pair: PairShape, where: str) -> None:
    """Raises DflashError where a model cannot be split as `profile` says."""
    ways, experts = profile.expert_parallel, pair.target.experts
    try:
        GpuLayout(profile.tensor_parallel).check(pair.target, pair.draft.model)
    except DflashError as error:
        what = f"tensor_parallel {profile.tensor_parallel}: {error.what}"
        raise DflashError(what, where=where, usage=True) from error
    if ways is not None and ways > 1 and experts is None:
        raise DflashError(
            f"expert_parallel {ways} is for mixtures of experts; this target is dense",
            where=where,
            fix="leave it out",
            usage=True,
        )
    if ways is not None and experts is not None and experts.experts % ways:
        raise DflashError(
            f"expert_parallel {ways} does not divide {experts.experts} experts",
            where=where,
            usage=True,
        )


def check_precision(precision: str, gpu: Gpu, where: str) -> None:
    """Raises DflashError for a quantised precision that `gpu`'s tensor cores do not multiply."""
    if precision in QUANTIZED and precision not in gpu.formats:
        raise DflashError(
            f"{gpu.title} ({gpu.arch}) does not multiply in {precision}",
            where=where,
            fix=f"choose {' or '.join(gpu.formats)}"
            if gpu.formats
            else "leave the checkpoint as it is",
            usage=True,
        )


def check_unquantized(target: ModelShape, where: str) -> None:
    """Raises DflashError for a target in fewer bits already: before it is downloaded."""
    if target.mlp_format == "bf16":
        return
    fix = "leave out --precision"
    if target.mlp_format == "mxfp4":
        fix += ", or convert its experts with `dflash-trt quantize` and pass --target-checkpoint"
    raise DflashError(
        f"the target is quantized already, in {target.mlp_format}", where=where, fix=fix, usage=True
    )

"""deployment.json: what a deployment's folder is; and whether its YAML files still hold."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from dflash_trt.core.formats import Format
from dflash_trt.core.limits import Count
from dflash_trt.core.publish import StagedKind
from dflash_trt.core.validation import StrictRecord, read_record
from dflash_trt.core.yaml_files import read_yaml
from dflash_trt.deploy.trtllm.arguments import Variant
from dflash_trt.deploy.trtllm.deployment_rules import (
    check_backend,
    check_caches,
    check_draft_length,
    check_experts,
    check_feeding,
    check_parser,
    check_tail,
    refusal,
)
from dflash_trt.deploy.trtllm.schema import (
    PAGE_TOKENS,
    AttentionBackend,
    BlockDrafts,
    DSparkConfig,
    check_arguments,
)
from dflash_trt.deploy.trtllm.versions import find_version
from dflash_trt.hardware.gpus import find_gpu
from dflash_trt.models.build_config import HardwareProfile

RECORD_NAME = "deployment.json"
DEPLOYMENT = StagedKind("TensorRT-LLM deployment", RECORD_NAME)
SCHEMA_VERSION: Literal[2] = 2

Bytes = Annotated[int, Field(ge=0)]


class Memory(StrictRecord):
    """Bytes on one GPU; see `memory.served.ServedMemory`."""

    gpu_memory: Bytes
    weights: Bytes
    draft_context: Bytes
    states: Bytes = 0
    fraction: Annotated[float, Field(ge=0, le=1)]
    kv_pool: Bytes
    kv_sequence: Bytes
    sequences: Annotated[int, Field(ge=0)]


class Deployment(StrictRecord):
    """What was written.

    Args:
        name, profile_name, profile: of the configuration and its hardware.
        tensorrt_llm: the version whose fields the YAML files have.
        checked: what they were checked against; nothing was run.
        target, draft, eagle3: hub names, or folders below /deployment.
        precision: of target and draft where this build quantised them.
        trained_block: of the draft; max_draft_len is at most one less.
        architecture: of the target, as its config.json calls it, where that is known.
        experts: what the target's experts are stored in; None where it is dense.
        windows: whether the target has layers with sliding windows.
        recurrent: whether it has recurrent ones.
        llm_args: what the profile and the command line set besides.
    """

    schema_version: Literal[2] = SCHEMA_VERSION
    name: str
    created_by: str
    tensorrt_llm: str
    checked: str
    profile_name: str
    profile: HardwareProfile
    target: str
    draft: str
    eagle3: str | None
    precision: dict[str, str]
    variants: list[Variant]
    max_batch: Count
    max_seq_len: Count
    max_draft_len: Count
    trained_block: Count
    architecture: str | None
    experts: Annotated[Format, Field(strict=False)] | None
    windows: bool
    recurrent: bool = False
    attention_backend: AttentionBackend
    llm_args: dict[str, Any]
    memory: Memory


def is_deployment(folder: Path) -> bool:
    """Whether `folder` looks like what `write_deployment` writes."""
    return (folder / RECORD_NAME).is_file()


def read_deployment(folder: Path) -> Deployment:
    """The record in `folder`.

    Raises:
        DflashError: unreadable, of another schema version, or with other fields.
    """
    return read_record(
        folder / RECORD_NAME, Deployment, SCHEMA_VERSION, "build the deployment again"
    )


def yaml_files(variant: Variant) -> tuple[str, str]:
    """A variant's two YAML files, by their paths in the folder: trtllm-serve's and the model's."""
    return f"serve/{variant}.yaml", f"triton/{variant}/tensorrt_llm/1/model.yaml"


def check_deployment(folder: Path, deployment: Deployment) -> int:
    """Checks the YAML files in `folder`, which may have been edited; returns how many there are.

    Raises:
        DflashError: a field or a value that the version does not take, what does not go with draft,
            target or GPU, other GPUs or more sequences and tokens than memory was counted for.
    """
    version, gpu = find_version(deployment.tensorrt_llm), find_gpu(deployment.profile.gpu)
    paths = [folder / name for variant in deployment.variants for name in yaml_files(variant)]
    for path in paths:
        arguments = read_yaml(path, within=folder)
        speculation = check_arguments(arguments, version, path)
        _check_counted(arguments, deployment, path)
        cache, backend = arguments.get("kv_cache_config") or {}, None
        if isinstance(speculation, BlockDrafts):
            backend = speculation.attention_backend
            check_feeding(speculation, str(path))
            check_draft_length(speculation, deployment.trained_block, str(path))
            check_backend(backend, gpu, str(path))
            check_tail(
                arguments["speculative_config"].get("context_recompute_tail"),
                reuses=cache.get("enable_block_reuse", True),
                version=version,
                windows=deployment.windows,
                dspark=isinstance(speculation, DSparkConfig),
                recurrent=deployment.recurrent,
                where=str(path),
            )
        dtype, page = cache.get("dtype", "auto"), cache.get("tokens_per_block", PAGE_TOKENS)
        check_caches(dtype, page, gpu, backend, deployment.max_seq_len, str(path))
        moe, ways = arguments.get("moe_config"), arguments.get("moe_expert_parallel_size") or 1
        asked = None if moe is None else moe.get("backend", "AUTO")
        check_experts(asked, deployment.experts, gpu, ways=ways, where=str(path))
        check_parser(arguments.get("reasoning_parser"), deployment.architecture, str(path))
    return len(paths)


def _check_counted(arguments: Mapping[str, Any], deployment: Deployment, where: Path) -> None:
    """Raises DflashError for other GPUs, or more on them, than memory was counted for."""
    profile, fix = deployment.profile, "build the deployment again for that"
    exact = {
        "tensor_parallel_size": (1, profile.tensor_parallel),
        "pipeline_parallel_size": (1, 1),
        "moe_expert_parallel_size": (None, profile.expert_parallel),
        "enable_attention_dp": (False, deployment.llm_args.get("enable_attention_dp", False)),
    }
    for name, (default, counted) in exact.items():
        found = arguments.get(name, default)
        if found != counted:
            raise refusal(f"{name} {found} is not {counted}, as the profile has it", where, fix)
    most = {"max_batch_size": deployment.max_batch, "max_seq_len": deployment.max_seq_len}
    for name, counted in most.items():
        found = arguments.get(name)
        if found is None or found > counted:
            what = f"{name} {found or 'missing'}: memory was counted for {counted}"
            raise refusal(what, where, fix)

"""deployment.json: what a deployment's folder is; and whether its YAML files still hold."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from dflash_trt.bundle.staging import StagedKind
from dflash_trt.config import HardwareProfile
from dflash_trt.core.limits import Count
from dflash_trt.core.validation import StrictRecord, read_record
from dflash_trt.core.yaml_files import read_yaml
from dflash_trt.hardware.gpus import find_gpu
from dflash_trt.memory.deployment import PAGE_TOKENS
from dflash_trt.trtllm.arguments import Variant
from dflash_trt.trtllm.rules import (
    check_backend,
    check_caches,
    check_draft_length,
    check_feeding,
)
from dflash_trt.trtllm.schema import AttentionBackend, DFlashConfig, check_arguments
from dflash_trt.trtllm.versions import find_version

RECORD_NAME = "deployment.json"
DEPLOYMENT = StagedKind("TensorRT-LLM deployment", RECORD_NAME)
SCHEMA_VERSION: Literal[1] = 1

Bytes = Annotated[int, Field(ge=0)]


class Memory(StrictRecord):
    """See `memory.MemoryBudget`; bytes on one GPU."""

    gpu_memory: Bytes
    weights: Bytes
    draft_context: Bytes
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
        llm_args: what the profile and the command line set besides.
    """

    schema_version: Literal[1] = SCHEMA_VERSION
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
        DflashError: a field or a value that the version does not take, a draft length, an attention
            backend or a KV cache that does not go with draft or GPU.
    """
    version, gpu = find_version(deployment.tensorrt_llm), find_gpu(deployment.profile.gpu)
    paths = [folder / name for variant in deployment.variants for name in yaml_files(variant)]
    for path in paths:
        arguments = read_yaml(path)
        speculation = check_arguments(arguments, version, path)
        cache, backend = arguments.get("kv_cache_config") or {}, None
        if isinstance(speculation, DFlashConfig):
            backend = speculation.attention_backend
            check_feeding(speculation, str(path))
            check_draft_length(speculation, deployment.trained_block, str(path))
            check_backend(backend, gpu, str(path))
        dtype, page = cache.get("dtype", "auto"), cache.get("tokens_per_block", PAGE_TOKENS)
        check_caches(dtype, page, gpu, backend, deployment.max_seq_len, str(path))
    return len(paths)

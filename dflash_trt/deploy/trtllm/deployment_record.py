"""deployment.json: what a deployment's folder is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from dflash_trt.core.formats import Format
from dflash_trt.core.limits import Count
from dflash_trt.core.publish import StagedKind
from dflash_trt.core.validation import StrictRecord, read_record
from dflash_trt.deploy.trtllm.schema import AttentionBackend
from dflash_trt.models.build_config import HardwareProfile

Variant = Literal["autoregressive", "disaggregated", "eagle3", "dflash", "dspark", "mtp"]
TITLES: dict[Variant, str] = {
    "autoregressive": "autoregressive decoding",
    "disaggregated": "disaggregated autoregressive decoding",
    "eagle3": "EAGLE-3",
    "dflash": "DFlash",
    "dspark": "DSpark",
    "mtp": "MTP",
}
WITHOUT_DRAFTS = ("autoregressive", "disaggregated")
OF_BLOCKS = ("dflash", "dspark")
"""Variants of the pair's own draft that has a checkpoint and a context of its own."""
OWN_DRAFTS = (*OF_BLOCKS, "mtp")
ROUTER_FILE = "disaggregated/router.yaml"
RECORD_NAME = "deployment.json"
DEPLOYMENT = StagedKind("TensorRT-LLM deployment", RECORD_NAME)
SCHEMA_VERSION: Literal[2] = 2

Bytes = Annotated[int, Field(ge=0)]


class DeploymentMemory(StrictRecord):
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
        target, draft, eagle3: hub names, or folders below /deployment; no draft is MTP.
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
    draft: str | None
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
    attention_backend: AttentionBackend | None
    llm_args: dict[str, Any]
    memory: DeploymentMemory

    def describe_drafts(self, trained: str = "") -> str:
        """How many drafts, and the attention of those that a checkpoint makes, `trained` so."""
        drafts = f"{self.max_draft_len} drafts"
        if self.attention_backend is None:
            return drafts
        return f"{drafts}{trained}, attention backend {self.attention_backend}"


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
    """A variant's two files of LLM arguments, by their paths in the folder.

    They are trtllm-serve's and the Triton model's; disaggregated, those of the two servers.
    """
    if variant == "disaggregated":
        return "disaggregated/context.yaml", "disaggregated/generation.yaml"
    return f"serve/{variant}.yaml", f"triton/{variant}/tensorrt_llm/1/model.yaml"

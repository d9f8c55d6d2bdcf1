"""`dflash-trt inspect` of a TensorRT-LLM deployment."""

from __future__ import annotations

import json
from pathlib import Path

import click

from dflash_trt.cli.progress import format_size
from dflash_trt.errors import DflashError
from dflash_trt.trtllm.record import Deployment, check_deployment, is_deployment, read_deployment


def inspect_deployment(folder: Path, *, as_json: bool) -> bool:
    """Shows a deployment and checks its YAML files, which may have been edited.

    Returns False where `folder` is none. Raises DflashError for options about bundles.
    """
    if not is_deployment(folder):
        return False
    context = click.get_current_context()
    for parameter in context.command.params:
        name = parameter.name or ""
        if name not in ("bundle", "as_json") and context.params.get(name):
            raise DflashError(
                "is about bundles; this is a TensorRT-LLM deployment",
                where=parameter.opts[-1],
                usage=True,
            )
    deployment = read_deployment(folder)
    checked = check_deployment(folder, deployment)
    if as_json:
        click.echo(json.dumps({**deployment.model_dump(), "files_checked": checked}, indent=2))
        return True
    for line in _describe(deployment):
        click.echo(line)
    click.echo(
        f"{checked} YAML files have only fields of TensorRT-LLM {deployment.tensorrt_llm}, and a "
        "draft length and attention backend that go with draft and GPU"
    )
    return True


def _describe(one: Deployment) -> list[str]:
    profile, memory = one.profile, one.memory
    quantised = [f"{role} in {precision}" for role, precision in one.precision.items()]
    return [
        f"{one.name}: deployment for TensorRT-LLM {one.tensorrt_llm} on {one.profile_name} "
        f"({profile.gpus} × {profile.gpu}), by {one.created_by}",
        f"status  checked against {one.checked}; not run",
        f"models  target {one.target}, draft {one.draft}"
        + (f", EAGLE-3 {one.eagle3}" if one.eagle3 else "")
        + (f"; quantised: {', '.join(quantised)}" if quantised else ""),
        f"limits  {one.max_batch} sequences of {one.max_seq_len} tokens, {one.max_draft_len} "
        f"drafts (trained block {one.trained_block}), attention backend {one.attention_backend}",
        f"memory  of a GPU: weights {format_size(memory.weights)}, draft context "
        f"{format_size(memory.draft_context)}, KV cache at least {format_size(memory.kv_pool)} of "
        f"{format_size(memory.gpu_memory)}: {memory.sequences} sequences of "
        f"{one.max_seq_len} tokens",
        f"variants {', '.join(one.variants)}; README.md has the commands",
    ]

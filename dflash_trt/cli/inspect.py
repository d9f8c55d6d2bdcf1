"""`dflash-trt inspect`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from dflash_trt.bundle.bundle import Bundle, open_bundle, verify_bundle
from dflash_trt.bundle.dims import ModelDims
from dflash_trt.bundle.manifest import Manifest
from dflash_trt.bundle.memory.memory import bundle_memory, engine_bytes, mask_bytes, token_bytes
from dflash_trt.bundle.sampling_defaults import describe_defaults, read_sampling_defaults
from dflash_trt.bundle.summary import (
    attention_line,
    cache_line,
    dflash2_line,
    draft_tokens_line,
    experts_line,
    int8_line,
    quantization_line,
    recurrent_line,
    storage_formats,
    summarize,
)
from dflash_trt.cli.bars import StageBars, format_size
from dflash_trt.cli.options import bundle_argument, json_option, print_json, refuse_given
from dflash_trt.decoding.drafter_kinds import DFLASH, DRAFTERS
from dflash_trt.decoding.tuning.bundle_schedule import AUTO, choose_schedule
from dflash_trt.deploy.trtllm.deployment_record import is_deployment, read_deployment
from dflash_trt.deploy.trtllm.deployment_rules import check_deployment
from dflash_trt.errors import DflashError


@click.command("inspect")
@bundle_argument
@click.option("--verify", is_flag=True, help="Check all recorded hashes, large files' too.")
@json_option
def command(bundle: Path, verify: bool, as_json: bool) -> None:
    """Show what BUNDLE holds, what it needs, and whether its files are whole.

    BUNDLE may be a TensorRT-LLM deployment.
    """
    if is_deployment(bundle):
        _inspect_deployment(bundle, as_json=as_json)
        return
    opened = open_bundle(bundle)
    manifest = opened.manifest
    schedules = {kind: choose_schedule(opened, AUTO, kind) for kind in DRAFTERS}
    checks = None
    if verify:
        total = sum(file.bytes for file in manifest.files if file.sha256 is not None)
        with StageBars() as bars:
            bars.stage("checking hashes", total)
            checks = verify_bundle(opened, bars.advance)
    if as_json:
        figures: dict[str, Any] = summarize(manifest)
        own = schedules[DFLASH]
        figures["block_schedule"] = None if own is None else own.to_json()
        figures["sampling_defaults"] = _sampling_defaults(opened)[0]
        print_json({**figures, "verified": checks})
        return
    for line in describe_bundle(manifest):
        click.echo(line)
    if (told := _sampling_defaults(opened)[1]) is not None:
        click.echo(f"samples {told}")
    for kind, schedule in schedules.items():
        if schedule is not None:
            note = "" if kind == DFLASH else f" ({DRAFTERS[kind]})"
            click.echo(f"blocks  {schedule.describe()}{note}")
    for line in checks or [f"{len(manifest.files)} files present with their sizes"]:
        click.echo(line)


def _sampling_defaults(bundle: Bundle) -> tuple[dict[str, Any] | None, str | None]:
    """What its checkpoint asks to sample by, and a line about it; unread where it is malformed."""
    try:
        defaults = dict(read_sampling_defaults(bundle))
    except DflashError as error:
        return None, error.message
    shown = describe_defaults(defaults)
    if not defaults:
        return defaults, None
    return defaults, f"by {shown}, where a request to the OpenAI port states none"


def describe_bundle(manifest: Manifest) -> list[str]:
    memory = bundle_memory(manifest)
    target, draft, limits = manifest.target, manifest.draft, manifest.limits
    taps = f"layers {', '.join(map(str, draft.target_layer_ids))} of {target.layers}"
    if draft.kind == "MTP":
        taps = "the target's output"
    windows = sorted({window for window in draft.layer_windows if window is not None})
    per_token = token_bytes(manifest)
    block = f"trained block {draft.trained_block_size}, mask token {draft.mask_token_id}"
    if draft.traits.is_chain:
        block = f"a chain of up to {draft.trained_block_size - 1}"
    return [
        f"{manifest.name}: {target.family} target with {draft.traits.title}, for executor "
        f"{manifest.executor} ({manifest.compute_dtype} compute), by {manifest.created_by}",
        f"target  {_dims(target)}, vocabulary {target.vocab_size:,}",
        f"        ends a text with {', '.join(map(str, target.eos_token_ids)) or 'no token'}",
        *_indented(experts_line(manifest)),
        *_indented(attention_line(manifest)),
        *_indented(recurrent_line(manifest)),
        *_indented(quantization_line(target, manifest.kv_dtype)),
        *_indented(int8_line(target)),
        f"draft   {_dims(draft)}, {block}",
        *_indented(quantization_line(draft, manifest.kv_dtype)),
        *_indented(dflash2_line(manifest)),
        *_indented(int8_line(draft)),
        *_indented(draft_tokens_line(manifest)),
        f"        taps {taps}; sliding windows "
        f"{', '.join(map(str, windows)) if windows else 'none'}",
        f"limits  {limits.max_batch} sequences of {limits.max_seq_len} tokens, block "
        f"{limits.block_size}, prefill chunk {limits.prefill_chunk}",
        f"weights {manifest.weights}: target {format_size(target.weight_bytes)}, draft "
        f"{format_size(draft.weight_bytes)} as stored",
        f"cache   {per_token[0]:,} + {per_token[1]:,} bytes per token (target + draft), "
        f"{cache_line(manifest)}",
        f"memory  {format_size(memory.total)} for {limits.max_batch} × {limits.max_seq_len} "
        f"tokens: weights {format_size(memory.target_weights)} + "
        f"{format_size(memory.draft_weights)}, caches {format_size(memory.target_cache)} + "
        f"{format_size(memory.draft_cache)}"
        + (f", states {format_size(memory.states)}" if memory.states else "")
        + (f", workspace {format_size(memory.workspace)}" if memory.workspace else ""),
        *_describe_engines(manifest),
    ]


def _describe_engines(manifest: Manifest) -> list[str]:
    if manifest.engines is None:
        return []
    engines, sizes = manifest.engines, engine_bytes(manifest)
    lines = [
        f"engines {manifest.executor} {engines.library_version} for {engines.arch}, caches of "
        f"{engines.cache_length} positions (the draft's holds its own embedding and output head)",
    ]
    if engines.draws:
        lines.append(
            "        tokens are drawn and accepted in the target's engine, sampled ones too; for "
            "requests with penalties, biases, min_p, grammars or forbidden tokens the host chooses"
        )
    target, draft, form = manifest.target.sizes, manifest.draft.sizes, manifest.graph_form
    masks = mask_bytes(target, draft, manifest.limits, form, engines.cache_length)
    if masks:
        lines.append(
            f"        attention by masks, {format_size(masks)} of the workspace: a byte for each "
            "row (of prefill_chunk, or of all blocks), cache position and kind of layer"
        )
    for engine in engines.files:
        size = format_size(sizes[engine.graph])
        lines.append(
            f"        {engine.graph:<11} {size}: {engine.layers:,} layers, "
            f"{engine.fused_attentions} fused attentions, {engine.cache_updates} cache updates"
            + "".join(f", {n} {name} products" for name, n in engine.quantized_products.items())
        )
        if engine.operations:
            forms = ", ".join(f"{name} {form}" for name, form in engine.operations.items())
            lines.append(f"        {'':<11} operations: {forms}")
    return lines


def _indented(line: str | None) -> list[str]:
    return [] if line is None else [f"        {line}"]


def _dims(dims: ModelDims) -> str:
    return (
        f"{dims.checkpoint}: {dims.layers} layers × {dims.hidden_size}, heads {dims.heads}/"
        f"{dims.kv_heads} × {dims.head_dim}, ffn {dims.intermediate_size}, "
        f"{dims.parameters:,} parameters in {'/'.join(storage_formats(dims))}"
    )


def _inspect_deployment(folder: Path, *, as_json: bool) -> None:
    """Shows a deployment and checks its YAML files, which may have been edited."""
    what = "is about bundles; this is a TensorRT-LLM deployment"
    refuse_given(click.get_current_context(), {"verify"}, what)
    one = read_deployment(folder)
    checked = check_deployment(folder, one)
    if as_json:
        print_json({**one.model_dump(), "files_checked": checked})
        return
    profile, memory = one.profile, one.memory
    quantised = [f"{role} in {precision}" for role, precision in one.precision.items()]
    lines = [
        f"{one.name}: deployment for TensorRT-LLM {one.tensorrt_llm} on {one.profile_name} "
        f"({profile.gpus} × {profile.gpu}), by {one.created_by}",
        f"status  checked against {one.checked}; not run",
        f"models  target {one.target}, draft {one.draft or 'its own layer'}"
        + (f", EAGLE-3 {one.eagle3}" if one.eagle3 else "")
        + (f"; quantised: {', '.join(quantised)}" if quantised else ""),
        f"limits  {one.max_batch} sequences of {one.max_seq_len} tokens, "
        f"{one.describe_drafts(f' (trained block {one.trained_block})')}",
        f"memory  of a GPU: weights {format_size(memory.weights)}, draft context "
        f"{format_size(memory.draft_context)}, KV cache at least {format_size(memory.kv_pool)} of "
        f"{format_size(memory.gpu_memory)}: {memory.sequences} sequences of "
        f"{one.max_seq_len} tokens",
        *([f"set     {json.dumps(one.llm_args)}"] if one.llm_args else []),
        f"variants {', '.join(one.variants)}; README.md has the commands",
    ]
    click.echo("\n".join(lines))
    click.echo(
        f"{checked} YAML files have only fields of TensorRT-LLM {one.tensorrt_llm}, ask for "
        "no more than memory was counted for, and go with draft, target and GPU"
    )

"""`dflash-trt build`."""

from __future__ import annotations

import click

from dflash_trt.building.build import BuiltBundle, build
from dflash_trt.building.deployment import BuiltDeployment
from dflash_trt.building.spec import (
    BuildSpec,
    CacheOptions,
    Checkpoints,
    DeploymentRequest,
    EngineRequest,
    LimitOptions,
    PrecisionOptions,
)
from dflash_trt.bundle.memory.memory import bundle_memory, engine_bytes
from dflash_trt.bundle.summary import (
    cache_line,
    draft_tokens_line,
    int8_line,
    precision_line,
    quantization_line,
    unscaled_models,
    versions_apart,
)
from dflash_trt.bundle.support import EXECUTORS, PRECISIONS
from dflash_trt.cli.bars import StageBars, format_size
from dflash_trt.cli.options import FILE, FOLDER, LAYERS, option_group, show_note
from dflash_trt.core.limits import MAX_COUNT, PAGE_SIZE, PAGE_SIZES
from dflash_trt.deploy.trtllm.schema import ATTENTION_BACKENDS
from dflash_trt.deploy.trtllm.versions import DEFAULT_VERSION, VERSIONS
from dflash_trt.graph.form import CacheDtype
from dflash_trt.hardware.gpus import DEFAULT_ARCH

_checkpoints = option_group(
    "checkpoints",
    Checkpoints,
    click.option("--target-checkpoint", type=FOLDER, help="Folder to use for the target."),
    click.option(
        "--draft-checkpoint",
        type=FOLDER,
        help="Folder to use for the draft; mtp: the layer in the target's own checkpoint.",
    ),
    click.option(
        "--target-layer-ids",
        type=LAYERS,
        help="Layers of the target, from 0, whose outputs the draft takes, as 1,9,17, where its "
        "config names none.",
    ),
)
_engines = option_group(
    "engines",
    EngineRequest,
    click.option(
        "--arch",
        help=f"GPU to build engines for.  [default: {DEFAULT_ARCH}; tensorrt: the GPU that is "
        "here]",
    ),
    click.option(
        "--plugins", is_flag=True, help="Use this project's kernels, as TensorRT plugins."
    ),
)
_precision = option_group(
    "precision",
    PrecisionOptions,
    click.option(
        "--precision",
        type=click.Choice(list(PRECISIONS)),
        help="fp8, nvfp4: quantize the target and the draft. bf16, fp16: what engines compute in "
        "(the CPU: fp32, or int8 products).  [default: bf16; fp32]",
    ),
    click.option(
        "--draft-precision",
        type=click.Choice(list(PRECISIONS)),
        help="The same for the draft; bf16, fp16: leave it as it is.  [default: as --precision; "
        "trtllm: as it is]",
    ),
    click.option(
        "--calibration",
        type=FILE,
        help='Texts to quantize with: .jsonl with a "prompt" each.  [default: the target\'s '
        "prompts]",
    ),
    click.option("--quantize-lm-head", is_flag=True, help="Quantize the target's lm_head too."),
)
_limits = option_group(
    "limits",
    LimitOptions,
    click.option(
        "--max-batch", type=click.IntRange(1, MAX_COUNT), help="Sequences decoded together."
    ),
    click.option(
        "--max-seq-len",
        type=click.IntRange(3, MAX_COUNT),
        help="Tokens of one sequence, prompt and output.",
    ),
    click.option(
        "--block-size", type=click.IntRange(2), help="Rows of a verify step; at most the trained."
    ),
)
_caches = option_group(
    "caches",
    CacheOptions,
    click.option(
        "--kv-layout",
        type=click.Choice(["linear", "paged"]),
        default="linear",
        help="paged: memory follows the tokens held, and requests share prefixes.",
    ),
    click.option(
        "--kv-dtype",
        type=click.Choice([dtype.value for dtype in CacheDtype]),
        default=CacheDtype.COMPUTE.value,
        help="What caches hold: the compute type, or E4M3 with a scale for each layer's K and "
        "V, the checkpoint's where it has them.",
    ),
    click.option(
        "--page-size",
        type=int,
        help=f"Tokens of a page, a power of two from {PAGE_SIZES[0]} to {PAGE_SIZES[-1]}.  "
        f"[default: {PAGE_SIZE}]",
    ),
    click.option(
        "--kv-pages",
        type=click.IntRange(1, MAX_COUNT),
        help="Pages of the pool that all sequences share.  [default: what --max-batch "
        "sequences of --max-seq-len need]",
    ),
)
_deployment = option_group(
    "deployment",
    DeploymentRequest,
    click.option(
        "--trtllm-version", help=f"trtllm: {' or '.join(VERSIONS)}.  [default: {DEFAULT_VERSION}]"
    ),
    click.option(
        "--block-schedule",
        type=FILE,
        help="trtllm: a block_schedule.json, which block at how many sequences.",
    ),
    click.option(
        "--attention-backend",
        type=click.Choice(ATTENTION_BACKENDS),
        help="trtllm: the draft's attention.  [default: by the GPU]",
    ),
    click.option(
        "--llm-arg",
        multiple=True,
        metavar="NAME=VALUE",
        help="trtllm: one of its arguments, as kv_cache_config.dtype=fp8; repeatable "
        "(docs/tensorrt-llm.md).  [default: the profile's]",
    ),
)


@click.command("build")
@click.option(
    "--target",
    help="A name from `targets`, a YAML file, or a folder with target/ and draft/.  [default: "
    "--target-checkpoint and --draft-checkpoint]",
)
@_checkpoints
@click.option(
    "--executor",
    type=click.Choice(EXECUTORS),
    default=EXECUTORS[0],
    help="What will run the bundle.",
)
@click.option(
    "--profile",
    help="Hardware to build for: a name from `targets`, or a GPU and how many, as l40sx2.  "
    "[trtllm: the only one]",
)
@_engines
@_precision
@_limits
@_caches
@_deployment
@click.option(
    "--copy-weights", is_flag=True, help="Copy weight files, so that onnx's tools open the bundle."
)
@click.option("--hash-weights", is_flag=True, help="Record the weight files' full SHA-256.")
@click.option("--overwrite", is_flag=True, help="Replace a bundle that exists.")
@click.option(
    "-o",
    "--output",
    type=FOLDER,
    help="The bundle's folder.  [default: ./NAME-bundle; trtllm: ./NAME-PROFILE]",
)
@option_group("spec", BuildSpec)
def command(spec: BuildSpec) -> None:
    """Turn a target and a draft checkpoint into a bundle.

    A bundle is a folder with the pair's graphs, its weights (linked, not copied, where the
    filesystem allows) and its tokenizer; every other command works on it. Checkpoints in high
    precision can be quantized on the way: the bundle's weights are then its own.

    With `--executor trtllm` it is a deployment instead: TensorRT-LLM's own files for DFlash,
    DSpark or MTP, EAGLE-3 and autoregressive decoding of the pair on a hardware profile.
    Checkpoints may stay names on the hub.
    """
    with StageBars() as bars:
        built = build(spec, bars)
    if isinstance(built, BuiltBundle):
        _show_bundle(built)
    else:
        _show_deployment(built)


def _show_bundle(built: BuiltBundle) -> None:
    manifest, draft = built.manifest, built.manifest.draft
    click.echo(
        f"{built.folder}: {manifest.target.family} target of {manifest.target.layers} layers "
        f"({manifest.target.parameters:,} parameters), {draft.kind} draft of {draft.layers} "
        f"({draft.parameters:,}), block {manifest.limits.block_size}, "
        f"{precision_line(manifest)}weights {manifest.weights}"
    )
    if built.int8_weights is not None:
        click.echo(
            f"weights in memory {format_size(bundle_memory(manifest).weights)}; with --precision "
            f"int8 {format_size(built.int8_weights)}, and other answers (docs/quantisation.md)"
        )
    for owner, dims in (("target", manifest.target), ("draft", manifest.draft)):
        for line in (quantization_line(dims, manifest.kv_dtype), int8_line(dims)):
            if line is not None:
                click.echo(f"quantised {owner}: {line}")
    if draft.owned and (line := draft_tokens_line(manifest)) is not None:
        click.echo(f"draft: {line}")
    if manifest.page_pool is not None or manifest.kv_dtype != "auto":
        click.echo(f"KV caches: {cache_line(manifest)}")
    if apart := versions_apart(manifest):
        show_note(
            f"{apart[0]} is not the version that {apart[1]} is named for: answers stay the "
            "target's, but few drafts of another version's are accepted"
        )
    if unscaled := unscaled_models(manifest):
        show_note(
            f"no scales for an FP8 KV cache are stated for {' and '.join(unscaled)}: 1 is "
            "taken, by which large values are clipped and answers may be nonsense; `quantize "
            "--kv-scales` or `build --precision fp8 --kv-dtype fp8` observes them"
        )
    if manifest.engines is not None:
        pool, took = manifest.page_pool, bundle_memory(manifest)
        layout, shape = "linear", f"{manifest.limits.max_batch} × {manifest.engines.cache_length}"
        shape += " positions"
        if pool is not None:
            layout, shape = "paged", f"{pool.pages + 1} × {pool.page_size} positions"
            for kind in pool.windowed:
                shape += f", {kind.pages + 1} × {pool.page_size} of windows of {kind.window:,}"
        sizes = engine_bytes(manifest).items()
        click.echo(
            f"engines for {manifest.engines.arch} in {manifest.compute_dtype}: "
            + ", ".join(f"{graph} {format_size(size)}" for graph, size in sizes)
            + f"; {layout} caches {format_size(took.caches)} ({shape}, allocated whole)"
            + (f", recurrent states {format_size(took.states)}" if took.states else "")
            + f", workspace {format_size(took.workspace)}"
        )
    if built.added_end is not None:
        others = [one for one in manifest.target.eos_token_ids if one != built.added_end]
        show_note(
            f"texts end with the tokenizer's eos_token {built.added_end} too, which the "
            f"checkpoint's configs do not name (they name {', '.join(map(str, others)) or 'none'})"
        )
    positions = manifest.draft.max_position_embeddings
    if positions is not None and positions < manifest.limits.max_seq_len:
        show_note(
            f"drafts end at {positions:,} positions: the draft was trained for no more "
            "(max_position_embeddings of its config.json), the target for "
            f"{manifest.target.max_position_embeddings:,}. Longer texts go on without drafts"
        )
    if built.taps_by_rule:
        taps = ", ".join(map(str, draft.target_layer_ids))
        show_note(
            f"the draft's config names no target_layer_ids: layers {taps} are tapped by the "
            "rule of its kind"
        )
    if not manifest.tokenizer:
        show_note("the target has no tokenizer.json; the bundle takes token ids only")


def _show_deployment(built: BuiltDeployment) -> None:
    output, deployment = built.folder, built.record
    memory, profile = deployment.memory, deployment.profile
    click.echo(
        f"{output}: {', '.join(deployment.variants)} of {deployment.name} on {profile.gpus} × "
        f"{profile.gpu}, {deployment.max_batch} sequences of {deployment.max_seq_len} tokens, "
        f"{deployment.describe_drafts()}; target {deployment.target}, "
        f"draft {deployment.draft or 'its own layer'}"
    )
    click.echo(
        f"memory of a GPU: weights {format_size(memory.weights)}, draft context "
        f"{format_size(memory.draft_context)}, KV cache at least {format_size(memory.kv_pool)} "
        f"({memory.sequences} sequences of {deployment.max_seq_len} tokens), of "
        f"{format_size(memory.gpu_memory)}"
    )
    if memory.sequences < deployment.max_batch:
        who = "each GPU holds" if deployment.llm_args.get("enable_attention_dp") else "holds"
        click.echo(
            f"{who} {memory.sequences} whole sequences of {deployment.max_seq_len:,} tokens, not "
            f"{deployment.max_batch}; shorter ones share its memory"
        )
    click.echo(f"checked against {deployment.checked}; not run. {output}/README.md says how to")
    for note in built.notes:
        show_note(note)

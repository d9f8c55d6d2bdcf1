"""`dflash-trt quantize`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import click

from dflash_trt.building.observing.observe import observe
from dflash_trt.cli.bars import StageBars, format_size
from dflash_trt.cli.options import FILE, FOLDER, json_option, print_json, show_note
from dflash_trt.core.files import resolved
from dflash_trt.core.formats import QUANTIZED, Format
from dflash_trt.errors import DflashError, first_few, refuse_options
from dflash_trt.models.decoder import DecoderSpec
from dflash_trt.models.draft import DraftSpec, read_draft
from dflash_trt.models.folder import read_config
from dflash_trt.models.pair_check import check_pair
from dflash_trt.models.target import TargetSpec, read_target
from dflash_trt.quantization.checkpoint import quantize_checkpoint
from dflash_trt.quantization.experts import convert_experts, has_mxfp4_experts
from dflash_trt.quantization.linears import QuantizeOptions, select_linears
from dflash_trt.quantization.partial import check_destination, partial_folder
from dflash_trt.quantization.rewrite import Rewritten, checkpoint_key
from dflash_trt.quantization.scales import Activations
from dflash_trt.text.prompts import encode_calibration

EXPERT_FORMATS = (Format.NVFP4, Format.BF16)
MODULES_SHOWN = 4


@click.command("quantize")
@click.option("--checkpoint", type=FOLDER, required=True, help="Folder of the model to quantize.")
@click.option(
    "--precision",
    type=click.Choice([form.value for form in (*QUANTIZED, Format.BF16)]),
    required=True,
    help="What the linears' weights and inputs become; MXFP4 experts: nvfp4 or bf16.",
)
@click.option(
    "--target-checkpoint",
    type=FOLDER,
    help="The checkpoint is a DFlash draft; this is its target, which calibration runs.",
)
@click.option(
    "--calibration",
    type=FILE,
    help='Texts to observe inputs on: .jsonl with a "prompt" each. Not for MXFP4 experts.',
)
@click.option(
    "--exclude",
    multiple=True,
    metavar="PATTERN",
    help="Leave these modules as they are, as in '*.down_proj'; repeatable.",
)
@click.option("--quantize-lm-head", is_flag=True, help="Quantize a target's lm_head too.")
@click.option(
    "--kv-scales",
    is_flag=True,
    help="Add the scales of FP8 KV caches (`build --kv-dtype fp8`), from the same texts.",
)
@click.option("--overwrite", is_flag=True, help="Replace a quantized checkpoint that exists.")
@json_option
@click.option("-o", "--output", type=FOLDER, required=True, help="The new checkpoint's folder.")
def command(
    checkpoint: Path,
    precision: str,
    target_checkpoint: Path | None,
    calibration: Path | None,
    exclude: tuple[str, ...],
    quantize_lm_head: bool,
    kv_scales: bool,
    overwrite: bool,
    as_json: bool,
    output: Path,
) -> None:
    """Write a copy of a checkpoint whose linears are FP8 or NVFP4, in ModelOpt's layout.

    Input scales come from running the model in float32 over the calibration texts, a user's
    message each where the tokenizer has a chat template. An interrupted run is continued when
    the same command is given again.

    Of a checkpoint in MXFP4 (gpt-oss) only the experts' format changes, to NVFP4 weights or bf16:
    every value is kept where the format can hold it, no texts are needed, and the blocks that had
    to be quantized again are counted.
    """
    check_destination(resolved(output), overwrite=overwrite)
    converts = target_checkpoint is None and has_mxfp4_experts(read_config(checkpoint))
    with StageBars() as bars, _interruption_note(output):
        if converts:
            if precision not in EXPERT_FORMATS:
                what = f"{checkpoint} has MXFP4 experts, which become {' or '.join(EXPERT_FORMATS)}"
                fix = "quantizing them again to fp8 takes more space and is no more exact"
                raise DflashError(what, where="--precision", fix=fix, usage=True)
            given = {
                "--calibration": calibration,
                "--exclude": exclude,
                "--quantize-lm-head": quantize_lm_head,
                "--kv-scales": kv_scales,
            }
            what = (
                "is not for a checkpoint whose experts are MXFP4: nothing else of it is quantized"
            )
            refuse_options(given, what, "leave it out")
            source = read_target(checkpoint).checkpoint
            written = convert_experts(source, Format(precision), output, bars, overwrite=overwrite)
        else:
            options = QuantizeOptions(
                Format(precision), exclude, quantize_lm_head, kv_scales, overwrite
            )
            written = _quantize(checkpoint, target_checkpoint, calibration, options, output, bars)
    if as_json:
        print_json(_to_json(written, precision if converts else None))
    else:
        click.echo(_describe_experts(written, precision) if converts else _describe(written))


def _quantize(
    checkpoint: Path,
    target_checkpoint: Path | None,
    calibration: Path | None,
    options: QuantizeOptions,
    output: Path,
    bars: StageBars,
) -> Rewritten:
    if options.form is Format.BF16:
        what = "is in floating point, or in a format that is not decoded"
        fix = "--precision bf16 is for checkpoints in MXFP4"
        raise DflashError(what, where=checkpoint, fix=fix, usage=True)
    if calibration is None:
        raise DflashError(
            "input scales come from texts", where="--calibration", fix="pass a file", usage=True
        )
    bars.stage("reading checkpoints", None)
    spec: DecoderSpec
    if target_checkpoint is None:
        spec = target = read_target(checkpoint)
    else:
        spec, target = read_draft(checkpoint), read_target(target_checkpoint)
        if not spec.traits.is_quantised:
            what = f"is {spec.traits.title}, which is not quantised yet"
            raise DflashError(what, where=checkpoint, fix="quantize the target", usage=True)
    select_linears(spec, options)  # refusals come before texts are read
    texts = encode_calibration(target.checkpoint.path, calibration)
    activations = _activations(spec, target, texts, bars)
    return quantize_checkpoint(spec, options, activations, output, bars)


@contextmanager
def _interruption_note(output: Path) -> Iterator[None]:
    """Says, when the user interrupts, where the work is that the same command continues."""
    try:
        yield
    except KeyboardInterrupt:
        if partial_folder(resolved(output)).is_dir():
            show_note(
                f"what is finished stays in {partial_folder(output)}; the same command "
                "continues from there"
            )
        raise


def _activations(
    spec: DecoderSpec, target: TargetSpec, sequences: list[list[int]], bars: StageBars
) -> Activations:
    """What the texts drive through the linears of `spec`, observed when it is needed."""

    draft = spec if isinstance(spec, DraftSpec) else None
    if draft is not None:
        check_pair(target, draft)

    def observed(workspace: Path) -> Mapping[str, float]:
        amax = observe(target, draft, sequences, bars, workspace=workspace)
        return amax["target" if draft is None else "draft"]

    parts = [checkpoint_key(target.checkpoint), sequences]
    return Activations(hashlib.sha256(json.dumps(parts).encode()).hexdigest(), observed)


def _describe(written: Rewritten) -> str:
    kept = first_few(written.kept, MODULES_SHOWN)
    errors = written.errors.values()
    return (
        f"{written.folder}: {written.algorithm}, {format_size(written.source_bytes)} → "
        f"{format_size(written.bytes)}; {len(errors)} linears quantized (relative error median "
        f"{median(errors):.4f}, largest {max(errors):.4f}); kept {kept or 'none'}"
    )


def _describe_experts(written: Rewritten, precision: str) -> str:
    reports = written.reports
    return (
        f"{written.folder}: experts in {precision}, {format_size(written.source_bytes)} → "
        f"{format_size(written.bytes)}; {len(reports)} tensors, "
        f"{sum(report.exact for report in reports.values()):,} blocks of 16 exact, "
        f"{sum(report.requantized for report in reports.values()):,} quantized again"
    )


def _to_json(written: Rewritten, experts: str | None) -> dict[str, Any]:
    """`experts` is the format that experts were converted to; None: linears were quantised."""
    errors, reports = written.errors, written.reports
    files = {
        "output": str(written.folder),
        **({"algorithm": written.algorithm} if experts is None else {"precision": experts}),
        "source_bytes": written.source_bytes,
        "bytes": written.bytes,
        "shards": written.shards,
        "resumed_shards": written.resumed_shards,
    }
    if experts is None:
        worst = max(errors, key=errors.__getitem__)
        middle, largest = median(errors.values()), errors[worst]
        error = {"median": middle, "max": largest, "max_module": worst}
        return files | {"linears": len(errors), "kept": [*written.kept], "relative_error": error}
    tensors = {
        name: {
            "exact_blocks": report.exact,
            "requantized_blocks": report.requantized,
            "relative_error_of_requantized": report.error,
        }
        for name, report in sorted(reports.items())
    }
    exact = sum(report.exact for report in reports.values())
    requantized = sum(report.requantized for report in reports.values())
    return files | {
        "exact_blocks": exact,
        "requantized_blocks": requantized,
        "tensors": tensors,
    }

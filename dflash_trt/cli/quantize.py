"""`dflash-trt quantize`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import click

from dflash_trt.building.observing import observe_pair, observe_target
from dflash_trt.cli.bars import StageBars, format_size
from dflash_trt.cli.convert_experts import convert, describe_files, interruption_note
from dflash_trt.cli.options import FILE, FOLDER, json_option, print_json
from dflash_trt.core.files import resolved
from dflash_trt.core.formats import QUANTIZED, Format
from dflash_trt.errors import DflashError, first_few
from dflash_trt.models.decoder import DecoderSpec
from dflash_trt.models.draft import DraftSpec, read_draft
from dflash_trt.models.folder import read_config
from dflash_trt.models.pair_check import check_pair
from dflash_trt.models.target import TargetSpec, read_target
from dflash_trt.quantization.checkpoint import quantize_checkpoint
from dflash_trt.quantization.experts import has_mxfp4_experts
from dflash_trt.quantization.linears import QuantizeOptions, select_linears
from dflash_trt.quantization.partial import check_destination
from dflash_trt.quantization.rewrite import Rewritten, checkpoint_key
from dflash_trt.quantization.scales import Activations
from dflash_trt.text.prompts import encode_calibration

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
    if target_checkpoint is None and has_mxfp4_experts(read_config(checkpoint)):
        given = {
            "--calibration": calibration,
            "--exclude": exclude,
            "--quantize-lm-head": quantize_lm_head,
            "--kv-scales": kv_scales,
        }
        convert(checkpoint, precision, given, output, overwrite=overwrite, as_json=as_json)
        return
    if precision == Format.BF16:
        raise DflashError(
            "is in floating point, or in a format that is not decoded",
            where=checkpoint,
            fix="--precision bf16 is for checkpoints in MXFP4",
            usage=True,
        )
    if calibration is None:
        raise DflashError(
            "input scales come from texts", where="--calibration", fix="pass a file", usage=True
        )
    options = QuantizeOptions(Format(precision), exclude, quantize_lm_head, kv_scales, overwrite)
    with StageBars() as bars:
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
        activations = _activations(
            spec, target, encode_calibration(target.checkpoint.path, calibration), bars
        )
        with interruption_note(output):
            written = quantize_checkpoint(spec, options, activations, output, bars)
    if as_json:
        print_json(_to_json(written))
    else:
        click.echo(_describe(written))


def _activations(
    spec: DecoderSpec, target: TargetSpec, sequences: list[list[int]], bars: StageBars
) -> Activations:
    """What the texts drive through the linears of `spec`, observed when it is needed."""

    def observe(workspace: Path) -> Mapping[str, float]:
        if pair is None:
            return observe_target(target, sequences, bars, workspace=workspace)
        return observe_pair(pair, sequences, bars, workspace=workspace).draft

    pair = check_pair(target, spec) if isinstance(spec, DraftSpec) else None
    parts = [checkpoint_key(target.checkpoint), sequences]
    return Activations(hashlib.sha256(json.dumps(parts).encode()).hexdigest(), observe)


def _describe(written: Rewritten) -> str:
    kept = first_few(written.kept, MODULES_SHOWN)
    errors = written.errors.values()
    return (
        f"{written.folder}: {written.algorithm}, {format_size(written.source_bytes)} → "
        f"{format_size(written.bytes)}; {len(errors)} linears quantized (relative error median "
        f"{median(errors):.4f}, largest {max(errors):.4f}); kept {kept or 'none'}"
    )


def _to_json(written: Rewritten) -> dict[str, Any]:
    worst = max(written.errors, key=written.errors.__getitem__)
    return {
        **describe_files(written, algorithm=written.algorithm),
        "linears": len(written.errors),
        "kept": list(written.kept),
        "relative_error": {
            "median": median(written.errors.values()),
            "max": written.errors[worst],
            "max_module": worst,
        },
    }

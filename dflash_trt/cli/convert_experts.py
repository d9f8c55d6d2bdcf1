"""`dflash-trt quantize` of a checkpoint whose experts are MXFP4: their format changes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from dflash_trt.cli.bars import StageBars, format_size
from dflash_trt.cli.options import print_json
from dflash_trt.core.files import resolved
from dflash_trt.core.formats import Format
from dflash_trt.errors import DflashError, refuse_options
from dflash_trt.models.target import read_target
from dflash_trt.quantization.experts import convert_experts
from dflash_trt.quantization.partial import partial_folder
from dflash_trt.quantization.rewrite import Rewritten

FORMATS = (Format.NVFP4, Format.BF16)
TENSORS_SHOWN = 8


def convert(
    checkpoint: Path,
    precision: str,
    given: Mapping[str, object],
    output: Path,
    *,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Writes `checkpoint` with its experts in `precision`, and says what was kept exactly.

    `given` has the values of options that only a calibrated quantisation has.
    """
    if precision not in FORMATS:
        raise DflashError(
            f"{checkpoint} has MXFP4 experts, which become {' or '.join(FORMATS)}",
            where="--precision",
            fix="quantizing them again to fp8 takes more space and is no more exact",
            usage=True,
        )
    refuse_options(
        given,
        "is not for a checkpoint whose experts are MXFP4: their format changes, and nothing else "
        "is quantized",
        "leave it out",
    )
    with StageBars() as bars:
        bars.stage("reading the checkpoint", None)
        source = read_target(checkpoint).checkpoint
        with interruption_note(output):
            written = convert_experts(source, Format(precision), output, bars, overwrite=overwrite)
    if as_json:
        print_json(_to_json(written, precision))
    else:
        click.echo(_describe(written, precision))


def describe_files(written: Rewritten, **kind: str | None) -> dict[str, Any]:
    """What JSON says of every rewritten checkpoint; `kind` has what it was written in."""
    return {
        "output": str(written.folder),
        **kind,
        "source_bytes": written.source_bytes,
        "bytes": written.bytes,
        "shards": written.shards,
        "resumed_shards": written.resumed_shards,
    }


@contextmanager
def interruption_note(output: Path) -> Iterator[None]:
    """Says, when the user interrupts, where the work is that the same command continues."""
    try:
        yield
    except KeyboardInterrupt:
        if partial_folder(resolved(output)).is_dir():
            click.echo(
                f"note: what is finished stays in {partial_folder(output)}; the same command "
                "continues from there",
                err=True,
            )
        raise


def _describe(written: Rewritten, precision: str) -> str:
    reports = written.reports
    exact = sum(report.exact for report in reports.values())
    changed = {name: report for name, report in reports.items() if report.requantized}
    requantized = sum(report.requantized for report in changed.values())
    lines = [
        f"{written.folder}: experts in {precision}, {format_size(written.source_bytes)} → "
        f"{format_size(written.bytes)}; {len(reports)} tensors, {exact:,} blocks of 16 exact, "
        f"{requantized:,} quantized again"
    ]
    for name, report in sorted(changed.items(), key=lambda one: -one[1].requantized):
        lines.append(
            f"  {name}: {report.requantized:,} of {report.exact + report.requantized:,} blocks "
            f"quantized again (their relative error {report.error:.4f})"
        )
    hidden = len(lines) - 1 - TENSORS_SHOWN
    if hidden > 0:
        lines[TENSORS_SHOWN + 1 :] = [f"  and {hidden} more tensors; --json has them all"]
    return "\n".join(lines)


def _to_json(written: Rewritten, precision: str) -> dict[str, Any]:
    reports = written.reports.values()
    return {
        **describe_files(written, precision=precision),
        "exact_blocks": sum(report.exact for report in reports),
        "requantized_blocks": sum(report.requantized for report in reports),
        "tensors": {
            name: {
                "exact_blocks": report.exact,
                "requantized_blocks": report.requantized,
                "relative_error_of_requantized": report.error,
            }
            for name, report in sorted(written.reports.items())
        },
    }

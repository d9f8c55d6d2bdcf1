"""`dflash-trt doctor`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import click

from dflash_trt.cli.options import FILE, json_option, print_json
from dflash_trt.cli.progress import StageBars
from dflash_trt.errors import EXIT_FAILED, DflashError
from dflash_trt.proof.doctor import examine

# What the embedded default needs; the other findings are information.
REQUIRED = ("demo pair", "build graphs", "run on the CPU")


@click.command("doctor")
@click.option(
    "--gpu-check", is_flag=True, help="Build the demo pair's engines for this GPU and probe them."
)
@click.option("-o", "--output", type=FILE, help="Where to record what --gpu-check found, as JSON.")
@json_option
def command(gpu_check: bool, output: Path | None, as_json: bool) -> int:
    """Say what this machine can build and run, a line each; exit 1 if the CPU path cannot.

    With --gpu-check: run engines on the GPU that is here, hold them to the CPU's results and time
    them; exit 1 if there is none, or if it does not do what it should.
    """
    if gpu_check:
        return _check_gpu(output, as_json)
    if output is not None:
        raise DflashError("--output is for --gpu-check", usage=True)
    findings = examine()
    if as_json:
        print_json([dataclasses.asdict(finding) for finding in findings])
    else:
        width = max(len(finding.capability) for finding in findings)
        for finding in findings:
            mark = "yes" if finding.ready else "no "
            click.echo(f"{mark}  {finding.capability:<{width}}  {finding.detail}")
    broken = any(not finding.ready for finding in findings if finding.capability in REQUIRED)
    return EXIT_FAILED if broken else 0


def _check_gpu(output: Path | None, as_json: bool) -> int:
    # Imported here: it brings both executors.
    from dflash_trt.proof.gpu_check import check_gpu, describe

    with StageBars() as bars:
        record = check_gpu(bars)
    text = json.dumps(record, indent=2)
    if output is not None:
        output.write_text(f"{text}\n", encoding="utf-8")
    for line in [text] if as_json else describe(record):
        click.echo(line)
    return 0 if record["passed"] else EXIT_FAILED

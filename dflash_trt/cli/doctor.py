"""`dflash-trt doctor`."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import click

from dflash_trt.cli.bars import StageBars
from dflash_trt.cli.options import FOLDER, json_option, print_json
from dflash_trt.errors import EXIT_FAILED, refuse_options
from dflash_trt.proof.doctor import examine

RECORD_FOLDER = Path("gpu-check")
# What the embedded default needs; the other findings are information.
REQUIRED = ("demo pair", "build graphs", "run on the CPU")


@click.command("doctor")
@click.option(
    "--gpu-check", is_flag=True, help="Run pairs, kernels and engines on the GPU that is here."
)
@click.option(
    "-o",
    "--output",
    type=FOLDER,
    help="Folder of --gpu-check's record; one that is there is gone on with.  [default: gpu-check]",
)
@click.option(
    "--only",
    metavar="STEP",
    multiple=True,
    help="Run this step or part of --gpu-check, however long; may be given several times.",
)
@json_option
def command(gpu_check: bool, output: Path | None, only: tuple[str, ...], as_json: bool) -> int:
    """Say what this machine can build and run, a line each; exit 1 if the CPU path cannot.

    With --gpu-check: hold PyTorch's executor, kernels and engines to the CPU's results on the GPU
    that is here and time them, for seven minutes at most; exit 1 if there is none, or if it does
    not do what it should.
    """
    if gpu_check:
        return _check_gpu(output or RECORD_FOLDER, only, as_json=as_json)
    given = {"--output": output, "--only": only}
    refuse_options(given, "is for --gpu-check")
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


def _check_gpu(folder: Path, only: tuple[str, ...], *, as_json: bool) -> int:
    # Imported here: it brings both executors.
    from dflash_trt.proof.gpu_check.check import check_gpu
    from dflash_trt.proof.gpu_check.gpu_record import PAGE_NAME, RECORD_NAME

    try:
        with StageBars() as bars:
            record = check_gpu(folder, bars, only)
    except (KeyboardInterrupt, SystemExit):
        if (folder / RECORD_NAME).is_file():
            click.echo(
                f"{folder} has what was found; the same command goes on from there", err=True
            )
        raise
    if as_json:
        print_json(record.to_json())
    else:
        for line in record.lines():
            click.echo(line)
        click.echo(f"{folder / PAGE_NAME} is the page, {folder / RECORD_NAME} has every figure")
        if any(one.status == "not run" for one in record.parts.values()):
            click.echo("the same command goes on with what is unfinished")
        elif record.unfinished():
            click.echo("--only NAME takes the time for what is unfinished")
    return 0 if record.passed else EXIT_FAILED

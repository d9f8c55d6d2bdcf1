"""`dflash-trt doctor`."""

from __future__ import annotations

import dataclasses
import json

import click

from dflash_trt.commands.options import json_option
from dflash_trt.doctor import examine
from dflash_trt.errors import EXIT_FAILED

# What the embedded default needs; the other findings are information.
REQUIRED = ("demo pair", "build graphs", "run on the CPU")


@click.command("doctor", short_help="Say what this machine can build and run.")
@json_option
def command(as_json: bool) -> int:
    """Say what this machine can build and run, a line each; exit 1 if the CPU path cannot."""
    findings = examine()
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
    else:
        width = max(len(finding.capability) for finding in findings)
        for finding in findings:
            mark = "yes" if finding.ready else "no "
            click.echo(f"{mark}  {finding.capability:<{width}}  {finding.detail}")
    broken = any(not finding.ready for finding in findings if finding.capability in REQUIRED)
    return EXIT_FAILED if broken else 0

"""`dflash-trt report`."""

from __future__ import annotations

import json
from pathlib import Path

import click

from dflash_trt.cli.options import FILE, FOLDER, json_option, parse_numbers
from dflash_trt.errors import DflashError


@click.command("report")
@click.argument("results", type=FOLDER)
@click.option(
    "-o",
    "--output",
    type=FILE,
    help="The page; Markdown and PNG lie beside it.  [default: RESULTS/report.html]",
)
@click.option(
    "--interactivity",
    help="Tokens/s per user to give the throughput at, as 100,500; the first is marked.",
)
@click.option("--baseline", help="The configuration others are compared with.")
@json_option
def command(
    results: Path,
    output: Path | None,
    interactivity: str | None,
    baseline: str | None,
    as_json: bool,
) -> None:
    """Draw the fronts, speed-ups, acceptance and latencies of a sweep's RESULTS.

    The page is one file that loads nothing: charts, tables and definitions are inside.
    """
    from dflash_perf.report.content import write_report

    page = output or results / "report.html"
    if page.suffix != ".html":
        raise DflashError("must end in .html", where=page, usage=True)
    targets = [] if interactivity is None else parse_numbers(interactivity, "--interactivity")
    files = write_report(results, page, targets, baseline)
    names = [str(file) for file in files]
    click.echo(json.dumps(names, indent=2) if as_json else "\n".join(names))

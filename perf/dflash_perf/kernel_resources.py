"""What kernels take on each architecture: registers, shared memory, spills. Needs no GPU.

    python -m dflash_perf.kernel_resources --output perf/results

The figures are the assembler's and depend on versions only: the same at every run.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import click
from dflash_plugins.compile import ARCHES, resource_table
from dflash_plugins.operation import main_cases

from dflash_perf.record import write_record


@click.command()
@click.option("--output", type=click.Path(path_type=Path), help="Folder to record the table in.")
def main(output: Path | None) -> None:
    """Compile every kernel's main configurations and say what they take."""
    with tempfile.TemporaryDirectory() as name:
        rows = resource_table(main_cases(), list(ARCHES), Path(name))
    spilled = sum(row["spill_store_bytes"] + row["spill_load_bytes"] for row in rows)
    most = max(row["registers"] for row in rows)
    click.echo(f"{len(rows)} kernels, at most {most} registers, {spilled} bytes spilled")
    if output is not None:
        write_record(output, "kernel-resources", "dflash_perf.kernel_resources", {"kernels": rows})


if __name__ == "__main__":
    main()

"""What kernels take on each architecture: registers, memory, instructions. Needs no GPU.

The figures are the assemblers' and the disassembler's and depend on versions only: the same at
every run.
"""

from __future__ import annotations

import click
from dflash_plugins.compile import resource_table
from dflash_plugins.table import main_cases

from dflash_perf.bench.base import Figures, Work, bench
from dflash_trt.hardware.kernels import kernel_arches


@bench()
def measure(work: Work) -> Figures:
    rows = resource_table(main_cases(), list(kernel_arches()), work.folder)
    spilled = sum(row["spilled_bytes"] for row in rows)
    most = max(row["registers"] for row in rows)
    click.echo(f"{len(rows)} kernels, at most {most} registers, {spilled} bytes spilled")
    return {"kernels": rows}

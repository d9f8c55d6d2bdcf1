"""`dflash-trt package`."""

from __future__ import annotations

from pathlib import Path

import click

from dflash_trt.bundle.staging import check_destination
from dflash_trt.cli.options import FOLDER, bundle_argument, show_thread_note
from dflash_trt.cli.packaging import packaging_options
from dflash_trt.cli.progress import StageBars
from dflash_trt.core.files import resolved
from dflash_trt.hardware.cores import AUTO, choose_threads
from dflash_trt.serving.server.repository import (
    ENSEMBLE_MODEL,
    LLM_MODEL,
    REPOSITORY,
    RepositoryOptions,
    write_repository,
)


@click.command("package")
@bundle_argument
@packaging_options
@click.option("--overwrite", is_flag=True, help="Replace a repository that exists.")
@click.option(
    "-o", "--output", type=FOLDER, help="The repository's folder.  [default: ./NAME-repository]"
)
def command(
    bundle: Path,
    packaging: RepositoryOptions,
    overwrite: bool,
    output: Path | None,
) -> None:
    """Turn BUNDLE into a model repository for Triton server, complete in itself.

    The same repository runs in a server started here and in NVIDIA's container.
    """
    output = output or Path(f"{resolved(bundle).name.removesuffix('-bundle')}-repository")
    check_destination(output, overwrite=overwrite, kind=REPOSITORY)
    with StageBars() as bars:
        packed, schedule = write_repository(bundle, output, packaging, bars, overwrite=overwrite)
    threads, queue = packaging.threads, packaging.max_queue_size
    chosen = choose_threads(threads, packed.manifest.target.parameters)
    show_thread_note(schedule, chosen)
    limits = packed.manifest.limits
    click.echo(
        f"{output}: models {LLM_MODEL} (LLM-API contract) and {ENSEMBLE_MODEL} (classic contract), "
        f"{limits.max_batch} slots of {limits.max_seq_len} tokens, a queue of {queue}"
        + (", threads by the machine that serves" if threads == AUTO else f", {threads} threads")
        + (f", {limit} s for a request" if (limit := packaging.request_seconds) else "")
        + (", no speculation" if not packaging.speculation else "")
    )

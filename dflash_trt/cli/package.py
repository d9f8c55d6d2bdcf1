"""`dflash-trt package`."""

from __future__ import annotations

from pathlib import Path

import click

from dflash_trt.bundle.staging import check_destination
from dflash_trt.cli.options import (
    FOLDER,
    block_schedule_option,
    bundle_argument,
    show_thread_note,
    threads_option,
)
from dflash_trt.cli.progress import StageBars
from dflash_trt.hardware.cores import AUTO, ThreadChoice, choose_threads
from dflash_trt.serving.server.repository import (
    ENSEMBLE_MODEL,
    LLM_MODEL,
    MAX_QUEUE_SIZE,
    REPOSITORY,
    RepositoryOptions,
    write_repository,
)


@click.command("package")
@bundle_argument
@click.option(
    "--no-speculation", is_flag=True, help="Serve the autoregressive baseline, the target alone."
)
@block_schedule_option
@click.option(
    "--max-queue-size",
    type=click.IntRange(0, 1 << 20),
    default=MAX_QUEUE_SIZE,
    help="Requests that may wait for a slot.",
)
@threads_option
@click.option("--overwrite", is_flag=True, help="Replace a repository that exists.")
@click.option(
    "-o", "--output", type=FOLDER, help="The repository's folder.  [default: ./NAME-repository]"
)
def command(
    bundle: Path,
    no_speculation: bool,
    block_schedule: str,
    max_queue_size: int,
    threads: ThreadChoice,
    overwrite: bool,
    output: Path | None,
) -> None:
    """Turn BUNDLE into a model repository for Triton server, complete in itself.

    The same repository runs in a server started here and in NVIDIA's container.
    """
    output = output or Path(f"{bundle.resolve().name.removesuffix('-bundle')}-repository")
    check_destination(output, overwrite=overwrite, kind=REPOSITORY)
    options = RepositoryOptions(
        speculation=not no_speculation,
        block_schedule=block_schedule,
        max_queue_size=max_queue_size,
        threads=threads,
        overwrite=overwrite,
    )
    with StageBars() as bars:
        packed, schedule = write_repository(bundle, output, options, bars)
    chosen = choose_threads(threads, packed.manifest.target.parameters)
    show_thread_note(schedule, chosen)
    limits = packed.manifest.limits
    click.echo(
        f"{output}: models {LLM_MODEL} (LLM-API contract) and {ENSEMBLE_MODEL} (classic contract), "
        f"{limits.max_batch} slots of {limits.max_seq_len} tokens, a queue of {max_queue_size}"
        + (", threads by the machine that serves" if threads == AUTO else f", {threads} threads")
        + (", no speculation" if no_speculation else "")
    )

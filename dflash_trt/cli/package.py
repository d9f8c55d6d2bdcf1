"""`dflash-trt package`; `serve` has its options too, for a bundle."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import click

from dflash_trt.cli.bars import StageBars
from dflash_trt.cli.options import (
    FOLDER,
    block_schedule_option,
    bundle_argument,
    option_group,
    show_thread_note,
    speculation_option,
    threads_option,
)
from dflash_trt.core.files import resolved
from dflash_trt.core.publish import check_destination
from dflash_trt.errors import refuse_options
from dflash_trt.hardware.cores import AUTO, choose_threads
from dflash_trt.serving.server.repository import (
    ENSEMBLE_MODEL,
    LLM_MODEL,
    REPOSITORY,
    RepositoryOptions,
    write_repository,
)

_DEFAULTS = RepositoryOptions()

packaging_options = option_group(
    "packaging",
    RepositoryOptions,
    block_schedule_option,
    speculation_option,
    click.option(
        "--max-queue-size",
        type=click.IntRange(0, 1 << 20),
        default=_DEFAULTS.max_queue_size,
        help="Requests that may wait for a slot; more are refused at once.",
    ),
    click.option(
        "--request-seconds",
        type=click.IntRange(0, 86400),
        default=_DEFAULTS.request_seconds,
        help="After so long, from its arrival on, a request ends with an error; 0: never.",
    ),
    threads_option,
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


def refuse_packaging(given: RepositoryOptions) -> None:
    """Raises DflashError (usage) where an option asks for what a repository has decided."""
    for field in fields(given):
        name = f"--{field.name.replace('_', '-')}"
        differs = getattr(given, field.name) != getattr(_DEFAULTS, field.name)
        refuse_options(
            {name: differs},
            "is a model repository, whose config.pbtxt says how to decode",
            f"pass a BUNDLE, or use `dflash-trt package {name}`",
        )

"""`dflash-trt package`; `serve` has its options too, for a bundle."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import click

from dflash_trt.bundle.bundle import open_bundle
from dflash_trt.cli.bars import StageBars
from dflash_trt.cli.options import (
    FOLDER,
    block_schedule_option,
    bundle_argument,
    option_group,
    refuse_given,
    show_thread_note,
    speculation_option,
    threads_option,
)
from dflash_trt.core.files import resolved
from dflash_trt.core.publish import check_destination
from dflash_trt.decoding.drafter_kinds import DFLASH, NOBODY
from dflash_trt.decoding.tuning.bundle_schedule import check_drafter, choose_schedule
from dflash_trt.deploy.trtllm.deployment_record import is_deployment
from dflash_trt.errors import DflashError, refuse_options
from dflash_trt.hardware.cores import AUTO, choose_threads
from dflash_trt.serving.kubernetes.deployment_manifests import deployment_manifests
from dflash_trt.serving.kubernetes.manifests import MANIFESTS, bundle_graph, write_manifests
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
@click.option("--dynamo", is_flag=True, help="Manifests for NVIDIA Dynamo's Kubernetes operator.")
@click.option("--image", metavar="NAME", help="What pods run.  [default: ours, or NVIDIA's]")
@click.option("--overwrite", is_flag=True, help="Replace a folder that exists.")
@click.option(
    "-o",
    "--output",
    type=FOLDER,
    help="The folder to write.  [default: ./NAME-repository or ./NAME-kubernetes]",
)
@click.pass_context
def command(
    context: click.Context,
    bundle: Path,
    packaging: RepositoryOptions,
    dynamo: bool,
    image: str | None,
    overwrite: bool,
    output: Path | None,
) -> None:
    """Turn BUNDLE into a model repository for Triton server, complete in itself.

    The same repository runs in a server started here and in NVIDIA's container. With --dynamo it is
    manifests for a cluster instead. BUNDLE may be a TensorRT-LLM deployment, of which manifests are
    made with --dynamo and without.
    """
    name = resolved(bundle).name.removesuffix("-bundle")
    if dynamo or is_deployment(bundle):
        output = output or Path(f"{name}-kubernetes")
        check_destination(output, overwrite=overwrite, kind=MANIFESTS)
        if is_deployment(bundle):
            what = "is a bundle's; a deployment's YAML files say how to decode"
            refuse_given(context, {field.name for field in fields(RepositoryOptions)}, what)
            made = deployment_manifests(resolved(bundle), image, dynamo=dynamo)
        else:
            made = _graph_of(bundle, packaging, image)
        kinds = write_manifests(output, made, overwrite=overwrite)
        click.echo(f"{output}: {', '.join(kinds)}; no cluster has seen them")
        click.echo(f"{output / MANIFESTS.marker} says at its top what must be there")
        return
    refuse_options({"--image": image}, "is for manifests", "add --dynamo, or leave it out")
    output = output or Path(f"{name}-repository")
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


def _graph_of(bundle: Path, packaging: RepositoryOptions, image: str | None) -> dict[str, str]:
    """Dynamo's graph of a bundle; its workers get the options that are not the defaults."""
    packaging.check()
    if Path(packaging.block_schedule).is_file():
        what = "is a file of this machine, which workers elsewhere lack"
        fix = "let `tune` write it into the bundle, which `auto` follows"
        raise DflashError(what, where="--block-schedule", fix=fix, usage=True)
    opened = open_bundle(resolved(bundle))
    drafter = DFLASH if packaging.drafter == NOBODY else packaging.drafter
    check_drafter(opened, drafter)
    choose_schedule(opened, packaging.block_schedule, drafter)
    arguments = [
        f"--{field.name.replace('_', '-')}={value}"
        for field in fields(packaging)
        if (value := getattr(packaging, field.name)) != getattr(_DEFAULTS, field.name)
    ]
    return bundle_graph(opened, arguments, packaging.threads, image)


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

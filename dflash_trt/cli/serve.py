"""`dflash-trt serve`."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import get_args

import click

from dflash_trt.bundle.bundle import load_tokenizer, open_bundle
from dflash_trt.bundle.manifest import MANIFEST_NAME
from dflash_trt.bundle.sampling_defaults import describe_defaults, read_sampling_defaults
from dflash_trt.cli.bars import StageBars
from dflash_trt.cli.options import (
    FILE,
    FOLDER,
    name_threads,
    option_group,
    refuse_given,
    show_note,
    show_thread_note,
)
from dflash_trt.cli.package import packaging_options, refuse_packaging
from dflash_trt.core.limits import MAX_COUNT
from dflash_trt.core.machine import allow_more_files
from dflash_trt.core.publish import hold_folder
from dflash_trt.decoding.tuning.break_even import advise_served
from dflash_trt.errors import DflashError, install_extra, one_line, refuse_options
from dflash_trt.hardware.cores import AUTO, choose_threads
from dflash_trt.serving.dynamo.local import LocalDynamo, LocalOptions
from dflash_trt.serving.dynamo.packages import check_dynamo
from dflash_trt.serving.openai.figures import FrontFigures
from dflash_trt.serving.openai.front_options import (
    KEYS_VARIABLE,
    FrontOptions,
    GenerationConfig,
    LogFormat,
)
from dflash_trt.serving.openai.json_log import wrap_output
from dflash_trt.serving.server.launcher import LOOPBACK, ServerOptions, bind_port, client_address
from dflash_trt.serving.server.metrics import read_totals
from dflash_trt.serving.server.repository import BUNDLE_FOLDER, RepositoryOptions, write_repository
from dflash_trt.serving.server.supervisor import MAX_RESTARTS, WINDOW_S, Service, Supervisor

PORT = click.IntRange(0, 65535)
COUNT = click.IntRange(1, MAX_COUNT)
_ADVISE_S = 60.0
_FRONT_ONLY = {
    "--served-model-name": "model_names",
    "--api-key-file": "key_file",
    "--key-requests": "key_requests",
    "--tls-cert": "tls_cert",
    "--tls-key": "tls_key",
    "--allow-origin": "origins",
}


@click.command("serve")
@click.argument("repository", metavar="REPO|BUNDLE", type=FOLDER)
@click.option("--host", default=LOOPBACK, help="Address of all ports but HTTP's.")
@click.option(
    "--expose-http", is_flag=True, help="Triton server's own HTTP listens at --host, at a risk."
)
@click.option("--grpc-port", type=PORT, default=8001, help="0: any free one.")
@click.option("--http-port", type=PORT, default=8000)
@click.option("--metrics-port", type=PORT, default=8002)
@click.option("--openai-port", type=PORT, help="Speak OpenAI's HTTP API too, on this port.")
@option_group(
    "front",
    FrontOptions,
    click.option(
        "--served-model-name",
        "model_names",
        metavar="NAME",
        multiple=True,
        help="What the OpenAI port's model is called; repeatable.  [default: the bundle's name]",
    ),
    click.option(
        "--api-key-file",
        "key_file",
        type=FILE,
        help="The OpenAI port's API keys, one a line; read again when it changes.  [default: "
        f"${KEYS_VARIABLE}, else everyone may ask]",
    ),
    click.option(
        "--key-requests", type=COUNT, help="Outputs in flight of one API key.  [default: any]"
    ),
    click.option("--tls-cert", type=FILE, help="The OpenAI port speaks TLS by this PEM file..."),
    click.option("--tls-key", type=FILE, help="... and its key."),
    click.option(
        "--allow-origin",
        "origins",
        metavar="ORIGIN",
        multiple=True,
        help="Web pages of ORIGIN (https://host, or * for all) may ask the OpenAI port; "
        "repeatable.  [default: none]",
    ),
    click.option(
        "--log-format",
        type=click.Choice(get_args(LogFormat)),
        default=FrontOptions().log_format,
        help="json: a line on stderr for each request to the OpenAI port, without its text, and "
        "whatever else is written in JSON too.",
    ),
    click.option(
        "--generation-config",
        type=click.Choice(get_args(GenerationConfig)),
        default=FrontOptions().generation_config,
        help="Where a request to the OpenAI port states no temperature, top_k ...: auto takes "
        "those of the checkpoint's generation_config.json.",
    ),
    click.option(
        "--no-page",
        "page",
        is_flag=True,
        callback=lambda _context, _option, given: not given,
        help="No page at / of the OpenAI port.",
    ),
)
@packaging_options
@click.option(
    "--dynamo",
    "dynamo_workers",
    metavar="N",
    type=click.IntRange(1, 64),
    help="No Triton server: NVIDIA Dynamo's frontend and router on the OpenAI port (8000), and "
    "N workers of a BUNDLE, on this machine.",
)
@click.option("--log-file", type=FILE, help="Append what the server prints to FILE.")
@click.option(
    "--drain-seconds",
    "exit_timeout_s",
    type=click.IntRange(0, 86400),
    default=20,
    help="How long requests in flight may go on after SIGTERM.",
)
@click.option(
    "--max-restarts",
    type=click.IntRange(0),
    default=MAX_RESTARTS,
    help="Start a failed server again, until more than so many have failed within "
    f"{WINDOW_S / 60:g} minutes; 0: never.",
)
@option_group("server", ServerOptions)
@click.pass_context
def command(
    context: click.Context,
    dynamo_workers: int | None,
    server: ServerOptions,
    openai_port: int | None,
    front: FrontOptions,
    packaging: RepositoryOptions,
    max_restarts: int,
) -> int:
    """Serve a model repository, or a BUNDLE, which is packaged for the time being.

    Runs until SIGINT, SIGTERM or SIGHUP, after which requests in flight may end (a second signal
    cuts them off), and exits with the server's code. A server that fails is started again.
    """
    if dynamo_workers is not None:
        kept = {"repository", "host", "openai_port", "model_names", "dynamo_workers"}
        kept |= {"max_restarts", "log_file", "exit_timeout_s"}
        kept |= {field.name for field in fields(RepositoryOptions)}
        others = {one.name or "" for one in context.command.params} - kept
        refuse_given(context, others, "is a Triton server's or its front's, not Dynamo's")
        return _serve_dynamo(dynamo_workers, server, openai_port, front, packaging, max_restarts)
    if front.log_format == "json":
        wrap_output()
    ports = {f"--{name}-port": place for name, place in server.places.items()}
    ports["--openai-port"] = server.host, openai_port or 0
    seen: dict[int, str] = {}
    for option, (address, port) in ports.items():  # before other work
        if port and port in seen:
            raise DflashError(f"{port} is {seen[port]} already", where=option, usage=True)
        seen[port] = option
        bind_port(address, port, option).close()
    if openai_port is None:
        given = {name: getattr(front, field) for name, field in _FRONT_ONLY.items()}
        given["--no-page"] = not front.page
        refuse_options(given, "is for the OpenAI port", "add --openai-port, or leave it out")
    with _open_repository(server.repository, packaging) as repository:
        removed = () if repository == server.repository else (repository.parent,)
        options = replace(server, repository=repository, removed_with=removed)
        return asyncio.run(_serve(options, max_restarts, openai_port, front))


def _serve_dynamo(
    workers: int,
    server: ServerOptions,
    openai_port: int | None,
    front: FrontOptions,
    packaging: RepositoryOptions,
    max_restarts: int,
) -> int:
    """Runs Dynamo and its workers on this machine to their end; returns the exit code."""
    packaging.check()
    check_dynamo()
    started = time.monotonic()
    bundle = open_bundle(server.repository)
    load_tokenizer(bundle)
    if len(front.model_names) > 1:
        what = "Dynamo's models have one name each"
        raise DflashError(what, where="--served-model-name", usage=True)
    name = front.model_names[0] if front.model_names else bundle.manifest.name
    pool = bundle.manifest.page_pool
    if packaging.threads == AUTO:  # of which each worker would take all
        cores = choose_threads(AUTO, bundle.manifest.target.parameters)
        packaging = replace(packaging, threads=max(1, cores // workers))
    arguments = [str(server.repository), "--served-model-name", name]
    for field in fields(packaging):
        value = getattr(packaging, field.name)
        arguments += [f"--{field.name.replace('_', '-')}", str(value)]
    dynamo = LocalDynamo(
        LocalOptions(
            worker_arguments=tuple(arguments),
            workers=workers,
            page_size=None if pool is None else pool.page_size,
            host=server.host,
            port=8000 if openai_port is None else openai_port,
            drain_s=server.exit_timeout_s,
            max_restarts=max_restarts,
            log_file=server.log_file,
        ),
        lambda event: click.echo(event, err=True),
    )
    click.secho("starting Dynamo's frontend and its workers", err=True, dim=True)

    def show() -> None:
        click.echo(f"ready after {time.monotonic() - started:.1f} s")
        click.echo(f"OpenAI   http://{dynamo.address}/v1 (model {name})")
        click.echo(f"metrics  http://{dynamo.address}/metrics")
        for place, url in enumerate(dynamo.metrics_urls, start=1):
            click.echo(f"worker {place} {url}")

    return dynamo.run(show)


async def _serve(
    options: ServerOptions,
    max_restarts: int,
    openai_port: int | None,
    front_options: FrontOptions,
) -> int:
    """Runs the server, and the front if there is one, to their end; returns the exit code."""
    started = time.monotonic()
    allow_more_files()
    with ExitStack() as stack:
        # What can be wrong with the front is said before a server starts.
        bound = None
        if openai_port is not None:
            try:
                from dflash_trt.serving.openai.server import OpenAiServer
            except ImportError as error:
                what = f"the OpenAI front needs starlette and uvicorn ({one_line(error)})"
                fix = install_extra("serve")
                raise DflashError(what, fix=fix) from error
            bundle = open_bundle(options.repository / BUNDLE_FOLDER)
            tokenizer = load_tokenizer(bundle)
            takes = front_options.generation_config == "auto"
            defaults = read_sampling_defaults(bundle) if takes else {}
            front_options.check_tls()
            front_options.check_origins()
            front_options.open_keys()
            bound = stack.enter_context(bind_port(options.host, openai_port, "--openai-port"))
        service = stack.enter_context(Service())
        supervisor = Supervisor(options, lambda event: click.echo(event, err=True), max_restarts)
        server = stack.enter_context(supervisor.server)
        click.secho(f"starting {server.origin}", err=True, dim=True)
        if bound is not None and defaults:
            shown = f"generation_config.json gives {describe_defaults(defaults)}"
            click.secho(f"where a request states none, {shown}", err=True, dim=True)
        lines = [
            f"gRPC     grpc://{server.addresses.grpc}",
            f"HTTP     http://{server.addresses.http}",
            f"metrics  http://{server.addresses.metrics}/metrics",
        ]
        front = None
        if bound is not None:
            name = bundle.manifest.name
            front = OpenAiServer(
                name,
                supervisor,
                tokenizer,
                bundle.manifest.limits.max_seq_len,
                bound,
                front_options,
                # The server of now: it may be another.
                FrontFigures(
                    lambda: supervisor.server.read_metrics(), lambda: supervisor.failures, name
                ),
                defaults,
            )
            address = client_address(options.host, bound.getsockname()[1])
            names = ", ".join(front_options.model_names or (name,))
            lines.append(f"OpenAI   {front_options.scheme}://{address}/v1 (model {names})")
            if front_options.page:
                lines.append(f"page     {front_options.scheme}://{address}/")

        def show() -> None:
            click.echo(f"ready after {time.monotonic() - started:.1f} s")
            for line in lines:
                click.echo(line)

        advising = asyncio.create_task(_advise(supervisor, options.repository))
        try:
            return await service.run(supervisor, front, show)
        finally:
            advising.cancel()


async def _advise(supervisor: Supervisor, repository: Path) -> None:
    """Says once what to do where drafts bring less than they cost, as `tune` measured it."""
    if not (repository / BUNDLE_FOLDER / MANIFEST_NAME).is_file():
        return
    bundle, line = open_bundle(repository / BUNDLE_FOLDER), None
    while line is None:
        await asyncio.sleep(_ADVISE_S)
        figures = await asyncio.to_thread(supervisor.server.read_metrics)
        line = advise_served(bundle, read_totals(figures))
    show_note(line)


@contextmanager
def _open_repository(source: Path, packaging: RepositoryOptions) -> Generator[Path, None, None]:
    """The repository to serve: `source` itself, or a bundle's, packaged until the end."""
    if not (source / MANIFEST_NAME).is_file():
        if not any(source.glob("*/config.pbtxt")):
            what = "is neither a bundle nor a model repository"
            fix = "`dflash-trt build` makes the one, `dflash-trt package` the other"
            raise DflashError(what, where=source, fix=fix, usage=True)
        refuse_packaging(packaging)
        held = hold_folder(source)  # between two servers too
        try:
            yield source
        finally:
            os.close(held)
        return
    # Beside the bundle its files can be linked instead of copied.
    beside = source.absolute().parent
    place = beside if os.access(beside, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix=".dflash-trt-serve-", dir=place) as folder:
        repository = Path(folder) / "repository"
        with StageBars() as bars:
            bundle, schedule = write_repository(source, repository, packaging, bars)
        threads = choose_threads(packaging.threads, bundle.manifest.target.parameters)
        show_thread_note(schedule, threads)
        if named := name_threads(bundle.manifest, threads):
            click.secho(f"{named.removeprefix(', ')} for a step", err=True, dim=True)
        yield repository

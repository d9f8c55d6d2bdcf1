"""`dflash-trt dynamo-worker`."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import click

from dflash_trt.bundle.bundle import load_tokenizer, open_bundle
from dflash_trt.cli.options import bundle_argument
from dflash_trt.cli.package import packaging_options
from dflash_trt.errors import DflashError
from dflash_trt.serving.dynamo.packages import check_discovery, check_dynamo
from dflash_trt.serving.server.repository import RepositoryOptions

_ENDPOINT = re.compile(r"(?:dyn://)?([\w-]*)\.([\w-]+)\.([\w-]+)")


@click.command("dynamo-worker")
@bundle_argument
@click.option(
    "--endpoint",
    metavar="[NAMESPACE].COMPONENT.ENDPOINT",
    default=".backend.generate",
    help="Where Dynamo finds it; no namespace: $DYN_NAMESPACE, or dynamo.",
)
@click.option("--served-model-name", help="What the model is called.  [default: the bundle's name]")
@packaging_options
def command(
    bundle: Path,
    endpoint: str,
    served_model_name: str | None,
    packaging: RepositoryOptions,
) -> None:
    """Serve BUNDLE as a worker of NVIDIA Dynamo, whose frontend and router find it.

    Discovery, planes and ports are Dynamo's own variables (DYN_DISCOVERY_BACKEND, DYN_SYSTEM_PORT
    ...). SIGTERM drains it. A worker whose generator hangs or is broken ends, and Dynamo's frontend
    moves its requests to others.
    """
    found = _ENDPOINT.fullmatch(endpoint)
    if found is None:
        what = f"{endpoint!r} is not [NAMESPACE].COMPONENT.ENDPOINT"
        raise DflashError(what, where="--endpoint", usage=True)
    check_discovery()
    packaging.check()
    opened = open_bundle(bundle)
    load_tokenizer(opened)
    check_dynamo()
    from dflash_trt.serving.dynamo.engine import WorkerOptions, run_worker

    namespace, component, name = found.groups()
    options = WorkerOptions(
        bundle=bundle,
        decoding=packaging,
        endpoint=(namespace, component, name),
        model_name=served_model_name or opened.manifest.name,
    )
    # Dynamo's runtime drains at these; Python's own handlers would unwind it in the middle.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    run_worker(options)

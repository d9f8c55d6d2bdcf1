"""Checks for the libraries of the `perf` extra, before any work starts."""

from __future__ import annotations

from importlib.util import find_spec

from dflash_trt.errors import DflashError, install_extra


def require(purpose: str, *modules: str) -> None:
    """Raises DflashError unless all `modules` are installed; `purpose` begins the message."""
    for module in modules:
        if find_spec(module) is None:
            what = f"{purpose} needs {module}, which is not installed"
            raise DflashError(what, fix=install_extra("perf"))

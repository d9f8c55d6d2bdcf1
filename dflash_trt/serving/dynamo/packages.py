"""Whether Dynamo's packages are here, which an environment of its own has."""

from __future__ import annotations

from importlib import import_module, metadata

from dflash_trt.errors import DflashError, one_line

VERSION = "1.6"
_FIX = "pip install --no-deps -r deploy/dynamo/requirements.txt, in an environment of its own"


def check_dynamo() -> None:
    """Raises DflashError, with what to install, where a worker could not start."""
    try:
        import_module("dynamo.common.backend")
        import_module("prometheus_client")
        found = metadata.version("ai-dynamo")
    except ImportError as error:
        what = f"NVIDIA Dynamo {VERSION}'s packages are needed ({one_line(error)})"
        raise DflashError(what, fix=_FIX) from error
    if found.split(".")[:2] != VERSION.split("."):
        what = f"NVIDIA Dynamo {VERSION}'s packages are needed, and {found} is here"
        raise DflashError(what, fix=_FIX)

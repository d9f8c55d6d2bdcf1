"""Whether Dynamo's packages are here, which an environment of its own has."""

from __future__ import annotations

import os
from importlib import import_module, metadata

from dflash_trt.errors import DflashError, one_line

RELEASE = "1.6.1"
VERSION = RELEASE.rpartition(".")[0]
TENSORRT_LLM = "1.3.0rc29"
"""What the wheel's extra `trtllm` pins, and so Dynamo's image of that release has."""
CLUSTER = "KUBERNETES_SERVICE_HOST"
"""Set in each pod by Kubernetes."""
_FIX = "pip install --no-deps -r deploy/dynamo/requirements.txt, in an environment of its own"


def check_discovery() -> None:
    """Raises DflashError (usage) where a pod of a cluster looks for others in files of its own."""
    variable = "DYN_DISCOVERY_BACKEND"
    if os.environ.get(variable) == "file" and os.environ.get(CLUSTER):
        what = "file: a pod's files are its own, so no other pod would be found"
        fix = "leave it to Dynamo's operator, or choose kubernetes or etcd"
        raise DflashError(what, where=variable, fix=fix, usage=True)


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

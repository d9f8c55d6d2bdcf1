"""dflash-trt: DFlash speculative decoding, from two checkpoints to lossless tokens.

import dflash_trt

dflash_trt.build("demo", "first-bundle", overwrite=True)
with dflash_trt.load("first-bundle") as pair:
    for result in pair.generate(["fleet #6400 to #6410 in kyiv"], max_tokens=64):
        print(result.text, result.statistics.acceptance_length)
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from dflash_trt.version import __version__ as __version__

# ONNX Runtime would keep a database in the user's cache and tell its makers of every process that
# opens a session. It reads this once, when it is imported: no module of ours comes before this one,
# in no process. Whoever has set it keeps what he set.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

if TYPE_CHECKING:
    from dflash_trt.api import *  # noqa: F403  api.py alone lists the names


def __getattr__(name: str) -> Any:
    """The interface's names, imported when one is first asked for: commands need few of them."""
    import dflash_trt.api as api  # not `from dflash_trt`, which would ask here for `api`

    if name in ("__all__", *api.__all__):
        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__getattr__("__all__"), "__version__"]

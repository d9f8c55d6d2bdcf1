"""The machine and the versions that a recorded figure depends on."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from typing import Any


def describe_host(libraries: Iterable[str]) -> dict[str, Any]:
    """Cores, system, Python and the versions of those `libraries` that are installed."""
    return {
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "libraries": {name: found for name in libraries if (found := installed_version(name))},
    }


def installed_version(distribution: str) -> str | None:
    """Version of an installed distribution; None where it is not."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None

"""What this machine is, for recorded figures, and how many files it lets us open."""

from __future__ import annotations

import os
import platform
import resource
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


def describe_host(libraries: Iterable[str]) -> dict[str, Any]:
    """Cores, system, Python and the versions of those `libraries` that are installed."""
    return {
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "libraries": {name: found for name in libraries if (found := installed_version(name))},
    }


def processor() -> str:
    """The CPU's name, as the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or "unknown"
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"


def installed_version(distribution: str) -> str | None:
    """Version of an installed distribution; None where it is not."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def allow_more_files() -> None:
    """Raises this process's limit of open files, and that of its children, to what it may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 1 << 16 if hard == resource.RLIM_INFINITY else min(hard, 1 << 16)
    if soft != resource.RLIM_INFINITY and wanted > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))

"""NVIDIA's command-line tools: those that Triton language ships, and those of the package index."""

from __future__ import annotations

import re
import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, files
from importlib.util import find_spec
from pathlib import Path

PACKAGES = {"ptxas": "nvidia-cuda-nvcc", "nvdisasm": "nvidia-cuda-nvdisasm"}
"""The package of the index that has a tool's newest version."""


def shipped_tool(name: str) -> Path:
    """A tool of Triton language's, which must be installed."""
    spec = find_spec("triton")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent / "backends" / "nvidia" / "bin" / name


def newest_tool(name: str) -> Path | None:
    """A tool of `PACKAGES`; None where that package is not installed."""
    try:
        held = files(PACKAGES[name]) or []
    except PackageNotFoundError:
        return None
    return next((Path(str(file.locate())) for file in held if file.name == name), None)


@cache
def tool_version(tool: Path) -> str:
    """The version of a tool, as "12.9.86"."""
    told = subprocess.run([tool, "--version"], capture_output=True, text=True, check=True).stdout
    match = re.search(r"\bV(\d+(?:\.\d+)+)", told)
    assert match is not None, told
    return match.group(1)

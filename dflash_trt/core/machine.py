"""What this machine is, for recorded figures, and how many files it lets us open."""

from __future__ import annotations

import os
import platform
import resource
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

MANY_FILES = 1 << 16
"""More than connections can use up that nobody keeps from it."""

LIBRARIES = (
    "dflash-trt numpy ml_dtypes onnx onnxruntime cuda-python cuda-bindings triton torch tensorrt "
    "tensorrt-cu13 tensorrt-cu12 tensorrt-rtx tensorrt-rtx-cu13 tensorrt-rtx-cu12 grpcio "
    "tritonclient"
).split()
"""What a figure may depend on."""


def describe_host() -> dict[str, Any]:
    """Cores, system, Python and the versions of those LIBRARIES that are installed."""
    return {
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "libraries": {name: found for name in LIBRARIES if (found := installed_version(name))},
    }


def processor() -> str:
    """The CPU's name, as the system tells it."""
    return _cpu_fields().get("model name") or platform.processor() or "unknown"


def multiplies_bf16() -> bool:
    """Whether this CPU has instructions for bfloat16 products."""
    return not {"avx512_bf16", "amx_bf16"}.isdisjoint(_cpu_fields().get("flags", "").split())


def int8_kernels() -> tuple[str, bool]:
    """ONNX Runtime's kernels for eight-bit products here, and whether this project tested them."""
    flags = {*_cpu_fields().get("flags", "").split()}
    if "avx512_vnni" in flags:
        return "AVX-512 VNNI", True
    if "avx2" in flags and not flags & {"avx_vnni", "avx512bw"}:
        return "AVX2", True
    untested: list[str] = [one for one in ("avx_vnni", "avx512bw") if one in flags]
    return (untested or [platform.machine()])[0], False


def _cpu_fields() -> dict[str, str]:
    """What Linux tells of the first CPU; nothing elsewhere."""
    try:
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def read_told(path: Path) -> str:
    """What the system tells in a file of /proc or /sys; nothing where there is no such file."""
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""


def own_cgroups(root: Path) -> list[Path]:
    """Folders of the cgroups (version 2) that this process is in, the innermost first.

    `root` is where /proc and /sys lie.
    """
    top = root / "sys/fs/cgroup"
    for line in read_told(root / "proc/self/cgroup").splitlines():
        if line.startswith("0::/"):
            group = top / line.removeprefix("0::/")
            return [one for one in (group, *group.parents) if one.is_relative_to(top)]
    return []


def installed_version(distribution: str) -> str | None:
    """Version of an installed distribution; None where it is not."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def allow_more_files() -> None:
    """Raises this process's limit of open files, and that of its children, to what it may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MANY_FILES if hard == resource.RLIM_INFINITY else min(hard, MANY_FILES)
    if soft != resource.RLIM_INFINITY and wanted > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))

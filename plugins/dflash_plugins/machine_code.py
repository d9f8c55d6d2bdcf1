"""Machine code of PTX, what it takes, and which instructions it has, by NVIDIA's own tools.

`ptxas` is Triton language's choice; `nvdisasm` the package index's newest, or Triton language's. An
instruction counts as often as it stands in the code, not as often as it runs.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, files
from importlib.util import find_spec
from pathlib import Path

from dflash_trt.errors import DflashError, one_line
from dflash_trt.hardware.kernels import kernel_arches

DISASSEMBLER = "nvidia-cuda-nvdisasm"
"""The package of the index that has the newest disassembler."""

ASYNCHRONOUS = {"LDGSTS", "UBLKCP", "UTMALDG"}
"""Copies from global to shared memory that no thread waits for; the last two are bulk (TMA)."""
GLOBAL = {"LDG", "STG", "LDGSTS"}
LOCAL = {"LDL", "STL"}

# "/*0a40*/  @!P0 LDG.E.128 R4, ..."; lines of labels and data have no such address.
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z]\w*(?:\.\w+)*)", re.M)
_UNKNOWN = "Cannot decode architecture"


def disassembler() -> Path:
    """The newest `nvdisasm` that is installed; Triton language must be."""
    try:
        held = files(DISASSEMBLER) or []
    except PackageNotFoundError:
        held = []
    newest = next((Path(str(file.locate())) for file in held if file.name == "nvdisasm"), None)
    if newest is not None:
        return newest
    spec = find_spec("triton")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent / "backends" / "nvidia" / "bin" / "nvdisasm"


@dataclass(frozen=True, slots=True)
class Resources:
    """Registers per thread, bytes of shared memory per block, and bytes of stack and spills."""

    registers: int
    shared_bytes: int
    stack_bytes: int
    spilled_bytes: int


def assemble(ptx: str, arch: str, dynamic_shared: int) -> tuple[bytes, Resources]:
    """The cubin of `ptx`, by the ptxas of Triton language's choice, and its resources.

    `dynamic_shared` bytes are added to the shared memory that the PTX itself declares.

    Raises:
        DflashError: the assembler refuses it.
    """
    from triton.backends.nvidia.compiler import get_ptxas

    tool = get_ptxas(kernel_arches()[arch].number).path
    with tempfile.TemporaryDirectory(prefix="dflash-plugins-") as name:
        source, result = Path(name) / "kernel.ptx", Path(name) / "kernel.cubin"
        source.write_text(ptx, encoding="utf-8")
        command: list[str | Path] = [tool, "-v", f"--gpu-name={arch}", source, "-o", result]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise DflashError(f"ptxas refuses the PTX: {one_line(done.stderr)}", where=arch)
        return result.read_bytes(), parse_resources(done.stderr, dynamic_shared)


def parse_resources(report: str, dynamic_shared: int = 0) -> Resources:
    """Reads the report of `ptxas -v` about one kernel; adds `dynamic_shared` bytes to its own."""

    def figure(pattern: str) -> int:
        match = re.search(pattern, report)
        return int(match.group(1)) if match else 0

    return Resources(
        registers=figure(r"Used (\d+) registers"),
        shared_bytes=figure(r"(\d+) bytes smem") + dynamic_shared,
        stack_bytes=figure(r"(\d+) bytes stack frame"),
        spilled_bytes=figure(r"(\d+) bytes spill stores") + figure(r"(\d+) bytes spill loads"),
    )


@dataclass(frozen=True, slots=True)
class SassFacts:
    """Instructions of a kernel's machine code.

    Args:
        asynchronous_copies: copies to shared memory that overlap with work.
        wide_accesses: loads and stores of global memory, or such copies, of 128 bits or more.
        mma: the tensor cores' instructions, by name: HMMA (warp), HGMMA (warp group), UTCHMMA …
        local_accesses: loads and stores of a thread's local memory: spills, arrays.
    """

    asynchronous_copies: int
    wide_accesses: int
    mma: dict[str, int]
    local_accesses: int


def read_sass(cubin: bytes) -> SassFacts | None:
    """The facts of the kernel in `cubin`.

    None where no disassembler that is installed knows its architecture: the one that Triton
    language 3.6 ships does not know sm_103a, that of `nvidia-cuda-nvdisasm` does.

    Raises:
        DflashError: it cannot be disassembled.
    """
    with tempfile.TemporaryDirectory(prefix="dflash-plugins-") as name:
        path = Path(name) / "kernel.cubin"
        path.write_bytes(cubin)
        command: list[str | Path] = [disassembler(), "--print-code", path]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode and _UNKNOWN in done.stderr:
        return None
    if done.returncode:
        raise DflashError(f"nvdisasm refuses the machine code: {one_line(done.stderr)}")
    return count_instructions(done.stdout)


def count_instructions(listing: str) -> SassFacts:
    """The facts in what nvdisasm prints."""
    found = Counter(_INSTRUCTION.findall(listing))

    def total(operations: set[str], widths: frozenset[str] = frozenset()) -> int:
        return sum(
            count
            for name, count in found.items()
            for operation, *modifiers in [name.split(".")]
            if operation in operations and (not widths or widths & set(modifiers))
        )

    return SassFacts(
        asynchronous_copies=total(ASYNCHRONOUS),
        wide_accesses=total(GLOBAL, frozenset({"128", "256"})),
        mma={name: found[name] for name in sorted(found) if "MMA" in name.partition(".")[0]},
        local_accesses=total(LOCAL),
    )

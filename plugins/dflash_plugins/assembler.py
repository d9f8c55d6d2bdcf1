"""Machine code of PTX, by NVIDIA's assembler `ptxas`, and what it takes."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from dflash_plugins.cuda_tools import newest_tool, shipped_tool
from dflash_trt.errors import DflashError, one_line
from dflash_trt.hardware.kernels import kernel_arches


@dataclass(frozen=True, slots=True)
class Resources:
    """Registers per thread, bytes of shared memory per block, and bytes of stack and spills."""

    registers: int
    shared_bytes: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int

    @property
    def spilled_bytes(self) -> int:
        return self.spill_store_bytes + self.spill_load_bytes


def own_assembler(arch: str) -> Path:
    """The ptxas that kernels for `arch` are compiled with: Triton language's choice."""
    from triton.backends.nvidia.compiler import get_ptxas

    return Path(get_ptxas(kernel_arches()[arch].number).path)


def other_assemblers(arch: str) -> list[Path]:
    """Further versions of ptxas that are installed: a driver's compiler may be any of them."""
    known = [shipped_tool("ptxas-blackwell"), newest_tool("ptxas")]
    return [one for one in known if one is not None and one != own_assembler(arch)]


def assemble(
    ptx: str, arch: str, dynamic_shared: int, assembler: Path | None = None
) -> tuple[bytes, Resources]:
    """The cubin of `ptx`, by `assembler` (None: `own_assembler`), and its resources.

    `dynamic_shared` bytes are added to the shared memory that the PTX itself declares.

    Raises:
        DflashError: the assembler refuses it.
    """
    with tempfile.TemporaryDirectory(prefix="dflash-plugins-") as name:
        source, result = Path(name) / "kernel.ptx", Path(name) / "kernel.cubin"
        source.write_text(ptx, encoding="utf-8")
        tool = assembler or own_assembler(arch)
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
        spill_store_bytes=figure(r"(\d+) bytes spill stores"),
        spill_load_bytes=figure(r"(\d+) bytes spill loads"),
    )

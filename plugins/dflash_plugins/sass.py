"""What a kernel's machine code (SASS) says of its speed, without a GPU: which instructions it has.

The counts are of instructions in the code, not of how often they run.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from dflash_plugins.cuda_tools import newest_tool, shipped_tool
from dflash_trt.errors import DflashError, one_line

ASYNCHRONOUS = {"LDGSTS", "UBLKCP", "UTMALDG"}
"""Copies from global to shared memory that no thread waits for; the last two are bulk (TMA)."""
GLOBAL = {"LDG", "STG", "LDGSTS"}
LOCAL = {"LDL", "STL"}

# "/*0a40*/  @!P0 LDG.E.128 R4, ..."; lines of labels and data have no such address.
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z]\w*(?:\.\w+)*)", re.M)
_UNKNOWN = "Cannot decode architecture"


@dataclass(frozen=True, slots=True)
class SassFacts:
    """Instructions of a kernel's machine code.

    Args:
        asynchronous_copies: copies to shared memory that overlap with work.
        wide_accesses: loads and stores of global memory, or such copies, of 128 bits or more.
        mma: the tensor cores' instructions, by name: HMMA (warp), HGMMA (warp group), UTCHMMA …
        local_accesses: loads and stores of a thread's local memory: spills, arrays.
        barriers: waits of all threads of a block.
    """

    asynchronous_copies: int
    wide_accesses: int
    mma: dict[str, int]
    local_accesses: int
    barriers: int


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
        tool = newest_tool("nvdisasm") or shipped_tool("nvdisasm")
        command: list[str | Path] = [tool, "--print-code", path]
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
        barriers=total({"BAR"}),
    )

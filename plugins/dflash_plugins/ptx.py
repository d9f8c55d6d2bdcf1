"""Reads the PTX of Triton language, and fits it to the arguments that TensorRT passes.

Triton language adds two pointers to scratch memory to the end of every kernel's parameters.
TensorRT's ahead-of-time plugins do not pass them. A kernel without scratch never reads them, so
they are removed here. It also names all kernels of a function alike, whatever their constants.
"""

from __future__ import annotations

import re

from dflash_trt.errors import DflashError

SCRATCH_POINTERS = 2

_VERSION = re.compile(r"^\.version\s+(\d+)\.(\d+)\s*$", re.MULTILINE)
_ENTRY = re.compile(r"(\.visible\s+\.entry\s+(\w+)\s*\()([^)]*)(\))")


def ptx_version(ptx: str) -> tuple[int, int]:
    """The version of the PTX instruction set that `ptx` is written in, as (8, 7).

    Raises:
        DflashError: it names none.
    """
    match = _VERSION.search(ptx)
    if match is None:
        raise DflashError("PTX does not name its version")
    return int(match.group(1)), int(match.group(2))


def drop_scratch_pointers(ptx: str, arguments: int) -> str:
    """`ptx` without the scratch pointers: its entry has exactly `arguments` parameters.

    Raises:
        DflashError: the entry has another number of parameters, or reads a scratch pointer.
    """
    match = _find_entry(ptx)
    name, parameters = match.group(2), match.group(3).split(",")
    if len(parameters) != arguments + SCRATCH_POINTERS:
        raise DflashError(
            f"has {len(parameters)} parameters where {arguments} arguments and "
            f"{SCRATCH_POINTERS} scratch pointers were expected",
            where=name,
        )
    rest = ptx[match.end() :]
    for parameter in (one.split()[-1] for one in parameters[arguments:]):
        if re.search(rf"\b{parameter}\b", rest):
            raise DflashError(f"the kernel uses {parameter}, which nobody passes", where=name)
    kept = ",".join(parameters[:arguments])
    return ptx[: match.start()] + match.group(1) + kept + "\n" + match.group(4) + rest


def name_entry(ptx: str, name: str) -> str:
    """`ptx` with `name` as that of its entry, and of the entry's parameters.

    Raises:
        DflashError: there is no entry or more than one.
    """
    entry = _find_entry(ptx).group(2)
    return re.sub(rf"\b{entry}(?=\b|_param_\d+\b)", name, ptx)


def _find_entry(ptx: str) -> re.Match[str]:
    found = list(_ENTRY.finditer(ptx))
    if len(found) != 1:
        raise DflashError(f"PTX has {len(found)} entries; one kernel has one")
    return found[0]

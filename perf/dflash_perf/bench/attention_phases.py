"""Whether the compiler overlaps the phases of attention's tiles. Needs no GPU.

A tile is q k^T, its softmax, p v. The calculator of kernels puts them in a row: so this reads in
what Triton language makes of the loop (before its machine code) how many products are on their way
while the exponentials of a tile are computed. The loop is compiled as our kernel has it, with the
scores asked for a tile ahead, and with leave to give the phases to warps of their own; and with and
without a mask, for what a loop without one would save.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import click
from dflash_plugins.compile import check_compiler, run_compiler
from dflash_plugins.operation import Constant, KernelSpec

from dflash_perf.bench.base import Figures, Work, bench
from dflash_trt.hardware.kernels import kernel_arches

ROWS, HEAD_DIM, TILE, WARPS, STAGES = 64, 128, 64, 4, 3
"""Of a block of Qwen3-8B's draft."""

PARAMETERS = (
    ("q", "*bf16"),
    ("k_cache", "*bf16"),
    ("v_cache", "*bf16"),
    ("length", "i32"),
    ("attended", "*fp32"),
)
LOOPS: dict[str, dict[str, Constant]] = {
    "as it is": {},
    "scores a tile ahead": {"AHEAD": True},
    "phases for warps of their own": {"SPECIALIZED": True},
}
_PHASES = {
    "product": r"ttng\.warp_group_dot |ttng\.tc_gen5_mma ",
    "wait": r"ttng\.warp_group_dot_wait|ttng\.wait_barrier",
    "exponentials": rf"math\.exp2 .*tensor<{ROWS}x{TILE}xf32",
}
"""What begins a line of TTGIR; products of single warps (`tt.dot`) are waited for at once."""


@bench()
def measure(work: Work) -> Figures:
    check_compiler()
    rows = list(_compile_all())
    for row in rows:
        under = row["products_under_exponentials"]
        told = "in warps of their own" if under is None else f"{under} products on their way"
        click.echo(
            f"{row['arch']:8} {row['loop']:30} {row['warps']:3} warps"
            f"  {row['shared_bytes']:7,} bytes shared  exponentials: {told}"
        )
    masked = _count(MASKED=True), _count(MASKED=False)
    click.echo(f"sm_90a: {masked[0]} instructions of the loop with a mask, {masked[1]} without")
    return {"loops": rows, "instructions_sm_90a": {"masked": masked[0], "unmasked": masked[1]}}


def _compile_all() -> Iterator[dict[str, Any]]:
    for arch, known in kernel_arches().items():
        for loop, changes in LOOPS.items():
            if "SPECIALIZED" in changes and not arch.startswith("sm_10"):
                continue  # the compiler leaves it (sm_90a), or fails (sm_120a)
            raw = _compile(known.number, changes)
            yield {
                "arch": arch,
                "loop": loop,
                "warps": raw.metadata.num_warps,
                "shared_bytes": raw.metadata.shared,
                "products_under_exponentials": products_under_exponentials(raw.asm["ttgir"]),
            }


def _compile(capability: int, changes: Mapping[str, Constant]) -> Any:
    from dflash_perf.bench.attention_loop import attention_loop

    constants: dict[str, Constant] = {"ROWS": ROWS, "HEAD_DIM": HEAD_DIM, "TILE": TILE}
    constants |= {"AHEAD": False, "SPECIALIZED": False, "MASKED": True, **changes}
    spec = KernelSpec("attention_loop", PARAMETERS, tuple(constants.items()), WARPS, STAGES)
    return run_compiler(spec, attention_loop, capability)


def _count(**changes: Constant) -> int:
    """PTX instructions of the loop of `attention_loop` for sm_90a."""
    lines = _compile(90, changes).asm["ptx"].splitlines()
    labels = {line.partition(":")[0]: at for at, line in enumerate(lines) if line.startswith("$L")}
    jumps = [(at, line.split()[-1].rstrip(";")) for at, line in enumerate(lines) if " bra" in line]
    ((back, begin),) = {(at, labels[to]) for at, to in jumps if labels.get(to, at) < at}
    return sum(1 for line in lines[begin:back] if line.startswith("\t") and line.endswith(";"))


def products_under_exponentials(listing: str) -> int | None:
    """Products that are on their way when the loop computes a tile's exponentials.

    `listing` is TTGIR. None where the phases are parts of their own, which wait for each other.
    """
    if "ttg.warp_specialize" in listing:
        return None
    lines = listing.splitlines()
    begin = next(at for at, line in enumerate(lines) if "scf.for" in line)
    flying = 0
    for at, line in enumerate(lines):  # those before the loop too, which its first tile finds
        phase = next((name for name, one in _PHASES.items() if re.search(one, line)), None)
        if phase == "product":
            flying += 1
        elif phase == "wait":
            left = re.search(r"pendings = (\d+)", line)
            flying = int(left.group(1)) if left else flying - 1
        elif phase == "exponentials" and at > begin:
            return flying
    raise AssertionError("no loop with exponentials")

"""Compiles kernels to PTX and machine code, for GPUs that need not be here.

    python -m dflash_plugins.compile --arch sm_100a,sm_103a,sm_120a,sm_90a -o DIR

TensorRT embeds the machine code, a cubin of the PTX, in an engine; a report of it has the kernel's
registers, shared memory, spills and instructions. Names hold a hash of all that both depend on.
"""

from __future__ import annotations

import hashlib
import importlib
import json
from base64 import b64decode, b64encode
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click

from dflash_plugins.machine_code import Resources, assemble, read_sass
from dflash_plugins.operation import Case, KernelSpec
from dflash_plugins.ptx import drop_scratch_pointers, name_entry, ptx_version
from dflash_plugins.table import load_kernel, main_cases
from dflash_trt.core.user_cache import read_cache, write_cache
from dflash_trt.errors import DflashError, install_extra, one_line
from dflash_trt.hardware.kernels import kernel_arches

INSTALL = install_extra("plugins")
WARP = 32


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """One kernel for one architecture.

    The entry `name` of `ptx` has exactly the KernelSpec's parameters. `shared_bytes` is the dynamic
    shared memory of a launch, `threads` the threads of a block.
    """

    name: str
    arch: str
    ptx: str
    cubin: bytes
    threads: int
    shared_bytes: int
    resources: Resources


def compile_kernel(spec: KernelSpec, arch: str, folder: Path) -> CompiledKernel:
    """The kernel of `spec` for `arch`, read from `folder` if it was compiled before.

    Raises:
        DflashError: Triton language is not installed, the architecture has no kernels, or
            the kernel does not compile or exceeds what the architecture has.
    """
    check_arch(arch)
    check_compiler()
    function = load_kernel(spec.kernel)
    # An engine holds several kernels of one function, and TensorRT may tell them apart by name
    # alone. `cache_key` covers its source and that of the functions that it calls.
    text = f"{function.cache_key} {spec} {version('triton')}"
    name = f"{function.__name__}_{arch}_{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    path = folder / f"{name}.json"
    kept = _read(path)
    kernel = kept or _compile(spec, function, arch, name)
    check_limits(kernel)
    if kept is None:
        facts = asdict(kernel) | {"cubin": b64encode(kernel.cubin).decode()}
        write_cache(path, json.dumps(facts, indent=2).encode())
    return kernel


def _read(path: Path) -> CompiledKernel | None:
    try:
        facts = json.loads(read_cache(path))
        cubin, resources = b64decode(facts.pop("cubin")), Resources(**facts.pop("resources"))
        return CompiledKernel(cubin=cubin, resources=resources, **facts)
    except (ValueError, KeyError, TypeError):
        return None  # missing or damaged: it is compiled again


def _compile(spec: KernelSpec, function: Any, arch: str, name: str) -> CompiledKernel:
    raw = run_compiler(spec, function, kernel_arches()[arch].number)
    ptx = name_entry(drop_scratch_pointers(raw.asm["ptx"], len(spec.parameters)), name)
    shared = int(raw.metadata.shared)
    cubin, resources = assemble(ptx, arch, shared)
    return CompiledKernel(name, arch, ptx, cubin, spec.warps * WARP, shared, resources)


def check_limits(kernel: CompiledKernel) -> None:
    """Raises DflashError where `kernel` takes more than a block of its architecture has."""
    most, took = kernel_arches()[kernel.arch], kernel.resources
    registers = took.registers * kernel.threads
    limits = [
        (took.shared_bytes, most.shared_bytes, "bytes of shared memory in a block"),
        (took.registers, most.thread_registers, "registers in a thread"),
        (registers, most.registers, "registers in a block"),
        (kernel.threads, most.threads, "threads in a block"),
    ]
    over = [f"{has:,} {what}, at most {limit:,}" for has, limit, what in limits if has > limit]
    version = ptx_version(kernel.ptx)
    if version > most.ptx:
        over.append("PTX {}.{}, at most {}.{}".format(*version, *most.ptx))
    if over:
        raise DflashError(
            f"takes more than {kernel.arch} has: {'; '.join(over)}", where=kernel.name
        )


def check_arch(arch: str) -> None:
    """Raises DflashError, which lists the known ones, for an architecture without kernels."""
    if arch not in kernel_arches():
        known = ", ".join(kernel_arches())
        raise DflashError(f"{arch!r} is none of {known}", where="--arch", usage=True)


def check_compiler() -> None:
    """Raises DflashError where Triton language is not installed."""
    try:
        importlib.import_module("triton")
    except ImportError as error:
        raise DflashError(
            f"Triton language is not installed ({one_line(error, 80)})", fix=INSTALL
        ) from error


def run_compiler(spec: KernelSpec, function: Any, capability: int) -> Any:
    """`spec` compiled by Triton language, for a compute capability such as 100."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types, names = dict(spec.parameters), list(function.arg_names)
    if [name for name in names if name in types] != list(types):
        raise DflashError(f"its parameters are not in the order {list(types)}", where=spec.kernel)
    # TensorRT aligns tensors to 256 bytes, and executors bind caches at multiples of that.
    aligned = {(names.index(n),): [["tt.divisibility", 16]] for n in types if types[n][0] == "*"}
    signature = {name: types.get(name, "constexpr") for name in names}
    source = ASTSource(function, signature, dict(spec.constants), aligned)
    target = GPUTarget("cuda", capability, WARP)
    options = {"num_warps": spec.warps, "num_stages": spec.stages}
    with triton.knobs.compilation.scope():
        triton.knobs.compilation.disable_line_info = True  # it would put local paths in the PTX
        try:
            raw = triton.compile(source, target=target, options=options)
        except Exception as error:
            raise DflashError(f"does not compile: {one_line(error)}", where=spec.kernel) from error
    scratch = raw.metadata.global_scratch_size + raw.metadata.profile_scratch_size
    if scratch:
        raise DflashError(
            f"asks for {scratch} bytes of scratch memory, which nobody gives it", where=spec.kernel
        )
    return raw


def resource_table(
    cases: Sequence[Case], arches: Sequence[str], folder: Path
) -> list[dict[str, Any]]:
    """One row per case, tactic and architecture.

    It has the kernel's resources, and what its machine code holds (`SassFacts`; None where no
    disassembler is installed that reads it). PTX and machine code are left in `folder`.
    """
    rows: list[dict[str, Any]] = []
    for case in cases:
        for tactic in range(case.operation.tactics):
            for arch in arches:
                kernel = compile_kernel(case.kernel_spec(tactic), arch, folder)
                (folder / f"{kernel.name}.ptx").write_text(kernel.ptx)
                (folder / f"{kernel.name}.cubin").write_bytes(kernel.cubin)
                row = {"operation": case.operation.name, "case": case.name, "tactic": tactic}
                row |= {"arch": arch, "threads": kernel.threads, **asdict(kernel.resources)}
                facts = read_sass(kernel.cubin)
                rows.append(row | {"sass": None if facts is None else asdict(facts)})
    return rows


@click.command(help=(__doc__ or "").partition("\n")[0])
@click.option("--arch", default=",".join(kernel_arches()), show_default=True, help="Architectures.")
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="Where PTX and machine code go.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def main(arch: str, output: Path, as_json: bool) -> None:
    arches = [name.strip() for name in arch.split(",")]
    try:
        for name in arches:  # checked before minutes are spent compiling
            check_arch(name)
        output.mkdir(parents=True, exist_ok=True)
        rows = resource_table(main_cases(), arches, output)
    except OSError as error:
        raise click.ClickException(f"{output}: {error.strerror}") from error
    except DflashError as error:
        click.echo(f"Error: {error.message}", err=True)
        raise click.exceptions.Exit(error.exit_code) from error
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    for row in rows:
        mma = {name.partition(".")[0] for name in row["sass"]["mma"]} if row["sass"] else ()
        click.echo(
            f"{row['arch']:8} {row['operation']:34} {row['case']:32} {row['registers']:4} registers"
            f"  {row['shared_bytes']:7,} bytes shared  {row['spilled_bytes']} spilled"
            f"  {' '.join(sorted(mma))}"
        )


if __name__ == "__main__":
    main()

"""PTX and machine code for every architecture, without a GPU: entries, spills, what is kept."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from dflash_plugins import compile as compilation
from dflash_plugins import machine_code
from dflash_plugins.compile import (
    CompiledKernel,
    check_limits,
    compile_kernel,
    main,
    reassemble,
)
from dflash_plugins.gated_delta_step.launch import CHUNKS
from dflash_plugins.machine_code import (
    Resources,
    SassFacts,
    count_instructions,
    parse_resources,
    read_sass,
)
from dflash_plugins.operation import Case, DType
from dflash_plugins.ptx import drop_scratch_pointers, entry_parameters, name_entry
from dflash_plugins.row_sample.launch import make_cases
from dflash_plugins.table import main_cases

from dflash_trt.errors import DflashError
from dflash_trt.hardware.kernels import kernel_arches

pytest.importorskip("triton", reason="Triton language (the plugins extra) is not installed")

CASES = main_cases()
TENSOR_CORES = {"sm_90a": "HGMMA", "sm_100a": "UTCHMMA", "sm_103a": "UTCHMMA", "sm_120a": "HMMA"}
"""Of each architecture, the newest instruction that multiplies; tiles under 64 rows take HMMA."""
NARROW = {"accept"}
"""Kernels whose accesses need not be of 128 bits."""
REPORT = """\
ptxas info    : Compiling entry function 'f' for 'sm_90a'
ptxas info    : Function properties for f
    40 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 40 bytes cumulative stack size, 64 bytes smem
"""
ENTRY = """\
.visible .entry f(
\t.param .u64 .ptr .global .align 1 f_param_0,
\t.param .u32 f_param_1,
\t.param .u64 .ptr .global .align 1 f_param_2,
\t.param .u64 .ptr .global .align 1 f_param_3
)
.reqntid 32
{
\tld.param.b64 %rd1, [f_param_0];
\tret;
}
"""


LEAST = "sm_120a"
"""The architecture whose shared memory is the least."""
PARTLY = {f"block_attention{split}_{form}" for split in ("", "_split") for form in ("fp8", "paged")}
"""Forms of attention whose differences the paged FP8 form has all of."""
WIDEST = "gemma-4-31b target paged fp8"


def compilations() -> Iterator[object]:
    """Daily: for `LEAST` a case of each operation but `PARTLY`, and `WIDEST`. Exhaustive: all cases
    for it, and one of each operation for the other architectures. Full: all.
    """
    for arch in kernel_arches():
        seen = set[str]()
        for case in CASES:
            name = case.operation.name
            is_first = name not in seen and name not in PARTLY
            is_daily = arch == LEAST and (is_first or case.name == WIDEST)
            marks = [] if is_daily else [pytest.mark.exhaustive]
            if name in seen and arch != LEAST:
                marks.append(pytest.mark.full)
            seen.add(name)
            yield pytest.param(case, arch, marks=marks, id=f"{name} {case.name}-{arch}")


@pytest.mark.parametrize(("case", "arch"), compilations())
def test_kernels_compile_without_spills_for_every_architecture(
    case: Case, arch: str, kernels: Path
) -> None:
    """Whichever ptxas assembles them; the last tactic needs no memory that must be opted in to."""
    operation = case.operation
    for tactic in range(operation.tactics):
        kernel = compile_kernel(case.kernel_spec(tactic), arch, kernels)
        assert f".target {arch}" in kernel.ptx
        name, parameters = entry_parameters(kernel.ptx)
        assert name == kernel.name
        inputs, outputs = (["u64"] * len(side) for side in (operation.inputs, operation.outputs))
        assert parameters == inputs + ["u32"] * len(operation.extras) + outputs
        assert kernel.resources.spilled_bytes == kernel.resources.stack_bytes == 0
        assert os.fspath(Path.cwd()) not in kernel.ptx  # nothing of the machine that compiled it
        assert all(took["spilled_bytes"] == 0 for took in reassemble(kernel).values())
        facts = read_sass(kernel.cubin)
        if facts is None:
            continue
        assert facts.local_accesses == 0
        assert facts.wide_accesses > 0 or operation.kernel in NARROW
        kinds = {name.partition(".")[0] for name in facts.mma}
        if operation.kernel == "block_attention":
            assert facts.asynchronous_copies > 0
            few_rows = dict(case.kernel_spec(tactic).constants)["BLOCK_M"] < 64  # type: ignore[operator]
            assert kinds == {"HMMA" if few_rows else TENSOR_CORES[arch]}, tactic
        elif operation.name == "gated_delta_step" and tactic == CHUNKS:
            assert kinds == {"HMMA"}
        else:
            assert not kinds
    assert kernel.resources.shared_bytes <= kernel_arches()[arch].plain_shared_bytes
    if facts is None:
        pytest.skip("its instructions: nvidia-cuda-nvdisasm (the test extra) is not installed")


def test_what_was_compiled_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path
    spec = next(case for case in CASES if case.operation.name == "accept").kernel_spec()
    first = compile_kernel(spec, "sm_90a", folder)
    calls = []
    real = compilation.run_compiler
    monkeypatch.setattr(compilation, "run_compiler", lambda *a: calls.append(a) or real(*a))
    assert compile_kernel(spec, "sm_90a", folder) == first
    assert not calls
    others = [replace(spec, warps=2), replace(spec, constants=(("BLOCK", 64),))]
    compiled = [compile_kernel(changed, "sm_90a", folder) for changed in others]
    assert len({first.ptx, *(one.ptx for one in compiled)}) == 3 == len(calls) + 1
    assert len({first.name, *(one.name for one in compiled)}) == 3  # an engine tells them apart
    next(folder.glob("accept_sm_90a_*.cubin")).unlink()
    for one in (spec, *others):
        compile_kernel(one, "sm_90a", folder)
    assert len(calls) == 3
    cut = next(folder.glob("accept_sm_90a_*.ptx"))
    cut.write_bytes(cut.read_bytes()[:100])
    for one in (spec, *others):
        compile_kernel(one, "sm_90a", folder)
    assert len(calls) == 4


def test_a_kernel_over_the_limits_is_refused(tmp_path: Path) -> None:
    """By name and number; the same kernel fits an architecture that has more."""
    case = next(case for case in CASES if case.name == "qwen3.5-27b target")
    spec = replace(case.kernel_spec(), stages=3)
    with pytest.raises(DflashError) as refused:
        compile_kernel(spec, "sm_120a", tmp_path)
    assert re.fullmatch(
        "block_attention_sm_120a_[0-9a-f]{16}: takes more than sm_120a has: 102,400 bytes of "
        "shared memory in a block, at most 101,376",
        refused.value.message,
    )
    assert compile_kernel(spec, "sm_90a", tmp_path).shared_bytes > 101_376
    assert not list(tmp_path.glob("*sm_120a*"))


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16])
def test_what_threads_list_for_others_lies_between_barriers(dtype: DType, tmp_path: Path) -> None:
    """`row_sample`'s lists of groups: of so few that no reduction needs a barrier of its own."""
    _, case = make_cases("one group", dtype=dtype, batch=2, rows=4, vocabulary=200)
    ptx = compile_kernel(case.kernel_spec(), "sm_90a", tmp_path).ptx
    marks = {"bar.sync": "B", "st.global.b32": "S", "ld.global": "L", "$L__BB": "|"}
    found = re.findall("|".join(map(re.escape, marks)), ptx)
    seen = "".join(marks[one] for one in found)
    assert 0 < len(re.findall("S+", seen)) == len(re.findall("BS+B", seen))


@pytest.mark.parametrize(
    ("registers", "threads", "version", "found"),
    [
        (255, 256, "8.8", None),
        (256, 128, "8.8", "256 registers in a thread, at most 255"),
        (128, 544, "8.7", "69,632 registers in a block, at most 65,536"),
        (32, 1056, "8.8", "1,056 threads in a block, at most 1,024"),
        (32, 1024, "9.0", "PTX 9.0, at most 8.8"),
        (32, 1024, "8.10", "PTX 8.10, at most 8.8"),
        (255, 512, "9.1", "130,560 registers in a block, at most 65,536; PTX 9.1, at most 8.8"),
    ],
)
def test_each_limit_has_a_number(
    registers: int, threads: int, version: str, found: str | None
) -> None:
    resources = Resources(registers, 0, 0, 0, 0)
    kernel = CompiledKernel("f", "sm_90a", f".version {version}\n", b"", threads, 0, resources)
    with nullcontext() if found is None else pytest.raises(DflashError) as refused:
        check_limits(kernel)
    if found is not None:
        assert refused.value.message == f"f: takes more than sm_90a has: {found}"


def test_scratch_pointers_leave_the_entry() -> None:
    kept = drop_scratch_pointers(ENTRY, 2)
    assert entry_parameters(kept) == ("f", ["u64", "u32"])
    assert kept.endswith(ENTRY[ENTRY.index(".reqntid") :])


def test_an_entry_and_its_parameters_are_renamed() -> None:
    text = ENTRY + "// f of fine_f_param_0\n"
    named = name_entry(text, "g_1")
    assert entry_parameters(named) == ("g_1", entry_parameters(ENTRY)[1])
    assert "[g_1_param_0]" in named and named.endswith("// g_1 of fine_f_param_0\n")


@pytest.mark.parametrize(
    ("ptx", "message"),
    [
        (ENTRY.replace("[f_param_0]", "[f_param_2]"), "uses f_param_2, which nobody passes"),
        (ENTRY.replace(".param .u32 f_param_1,\n", ""), "3 parameters where 2 arguments"),
        (ENTRY + ENTRY, "PTX has 2 entries"),
        (ENTRY.replace(".param .u32 f_param_1", ".param f_param_1"), "cannot read the parameter"),
    ],
)
def test_an_entry_that_is_not_as_expected_is_refused(ptx: str, message: str) -> None:
    with pytest.raises(DflashError, match=message):
        drop_scratch_pointers(ptx, 2)


def test_resources_are_read_from_the_assemblers_report() -> None:
    resources = parse_resources(REPORT, dynamic_shared=1000)
    assert (resources.registers, resources.shared_bytes, resources.stack_bytes) == (168, 1064, 40)
    assert (resources.spill_store_bytes, resources.spill_load_bytes) == (12, 16)


@pytest.fixture
def one_case(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command compiles `accept` alone."""
    monkeypatch.setattr(compilation, "main_cases", lambda: main_cases(["accept"]))


@pytest.mark.usefixtures("one_case")
def test_the_command_prints_a_row_for_each_kernel(tmp_path: Path) -> None:
    arguments = ["--arch", "sm_120a,sm_90a", "-o", str(tmp_path)]
    shown = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert [line.split()[:2] for line in shown.output.splitlines()] == [
        ["sm_120a", "accept"],
        ["sm_90a", "accept"],
    ]
    rows = json.loads(CliRunner().invoke(main, [*arguments, "--json"]).output)
    assert {row["arch"] for row in rows} == {"sm_120a", "sm_90a"}
    assert {(row["sass"]["local_accesses"], *row["sass"]["mma"]) for row in rows} == {(0,)}
    others = [took for row in rows for took in row["other_ptxas"].values()]
    assert {took["spilled_bytes"] for took in others} == {0}
    assert min(took["registers"] for took in others) > 0
    assert sorted(path.suffix for path in tmp_path.iterdir()) == sorted(
        [".cubin", ".json", ".ptx"] * 2
    )


def test_an_unknown_architecture_is_wrong_usage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Said before anything is compiled for those that are known."""
    monkeypatch.setattr(compilation, "run_compiler", lambda *arguments: pytest.fail("compiled"))
    refused = CliRunner().invoke(main, ["--arch", "sm_90a,sm_80", "-o", str(tmp_path / "out")])
    assert (refused.exit_code, refused.output) == (
        2,
        "Error: --arch: 'sm_80' is none of sm_90a, sm_100a, sm_103a, sm_120a\n",
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("one_case")
def test_a_folder_that_takes_nothing_is_no_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    arguments = ["--arch", "sm_90a", "-o"]
    refused = CliRunner().invoke(main, [*arguments, str(tmp_path / "file" / "below")])
    assert (refused.exit_code, "file/below: Not a directory" in refused.output) == (1, True)
    monkeypatch.setattr(compilation, "write_cache", lambda path, data: None)  # a full disk
    refused = CliRunner().invoke(main, [*arguments, str(tmp_path / "full")])
    assert refused.exit_code == 1
    assert "the disk refuses what was compiled" in refused.output


LISTING = """\
.section\t.text.f,"ax",@progbits
.text.f:
        /*0000*/                   LDC R1, c[0x0][0x37c] ;
        /*0010*/              @!P0 LDG.E.128.CONSTANT R4, desc[UR4][R2.64] ;
        /*0020*/                   LDG.E R4, desc[UR4][R2.64] ;
        /*0030*/                   LDGSTS.E.BYPASS.LTC128B.128 [R7], desc[UR4][R2.64] ;
        /*0040*/               @P1 LDGSTS.E [R7], desc[UR4][R2.64] ;
        /*0050*/              @UP0 UTMALDG.2D [UR8], [UR4] ;
        /*0060*/                   UBLKCP.S.G [UR8], [UR4], UR6 ;
        /*0070*/                   LDGDEPBAR ;
        /*0080*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*0090*/                   LDSM.16.M88.4 R8, [R7] ;
        /*00a0*/                   HMMA.16816.F32.BF16 R8, R4, R6, R8 ;
        /*00b0*/                   HMMA.16816.F32.BF16 R8, R4, R6, R8 ;
        /*00c0*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24 ;
        /*00d0*/                   UTCHMMA gdesc[UR8], gdesc[UR10], tmem[UR12] ;
        /*00e0*/                   STL.64 [R1+0x8], R4 ;
        /*00f0*/                   LDL R4, [R1+0x8] ;
        /*0100*/                   STS.128 [R7], R4 ;
        /*0110*/                   STG.E.128 desc[UR4][R2.64], R4 ;
.L_x_0:
        /*10120*/                  EXIT ;
"""


def test_instructions_are_counted_by_what_they_do() -> None:
    assert count_instructions(LISTING) == SassFacts(
        asynchronous_copies=4,
        wide_accesses=3,
        mma={"HGMMA.64x64x16.F32.BF16": 1, "HMMA.16816.F32.BF16": 2, "UTCHMMA": 1},
        local_accesses=2,
        barriers=1,
    )


@pytest.mark.parametrize(
    ("said", "found"),
    [("Cannot decode architecture 'SM999'", None), ("not a cubin", "not a cubin")],
)
def test_an_unknown_architecture_is_no_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, found: str | None
) -> None:
    tool = tmp_path / "nvdisasm"
    tool.write_text(f'#!/bin/sh\necho "nvdisasm fatal : {said}" >&2\nexit 1\n')
    tool.chmod(0o755)
    monkeypatch.setattr(machine_code, "newest_tool", lambda name: tool)
    if found is None:
        assert read_sass(b"") is None
        return
    with pytest.raises(DflashError, match=found):
        read_sass(b"")

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
from dflash_plugins.compile import CompiledKernel, check_limits, compile_kernel, main
from dflash_plugins.gated_delta_step.launch import CHUNKS
from dflash_plugins.machine_code import Resources, read_sass
from dflash_plugins.operation import Case, DType
from dflash_plugins.ptx import drop_scratch_pointers
from dflash_plugins.row_sample.launch import make_cases
from dflash_plugins.table import main_cases

from dflash_trt.errors import DflashError
from dflash_trt.hardware.kernels import kernel_arches
from tests.plugins.conftest import entry_parameters

pytest.importorskip("triton", reason="Triton language (the plugins extra) is not installed")

CASES = main_cases()
TENSOR_CORES = {"sm_90a": "HGMMA", "sm_100a": "UTCHMMA", "sm_103a": "UTCHMMA", "sm_120a": "HMMA"}
"""Of each architecture, the newest instruction that multiplies; tiles under 64 rows take HMMA."""
NARROW = {"accept"}
"""Kernels whose accesses need not be of 128 bits."""
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
    """The last tactic needs no memory that must be opted in to."""
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
    """Unless its file is damaged."""
    spec = next(case for case in CASES if case.operation.name == "accept").kernel_spec()
    first = compile_kernel(spec, "sm_90a", tmp_path)
    calls = []
    real = compilation.run_compiler
    monkeypatch.setattr(compilation, "run_compiler", lambda *a: calls.append(a) or real(*a))
    assert compile_kernel(spec, "sm_90a", tmp_path) == first and not calls
    other = compile_kernel(replace(spec, warps=2), "sm_90a", tmp_path)
    assert len(calls) == 1 and other.ptx != first.ptx
    assert other.name != first.name, "an engine tells them apart"
    (tmp_path / f"{first.name}.json").write_text("{")
    assert compile_kernel(spec, "sm_90a", tmp_path) == first and len(calls) == 2


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
        (32, 1056, "8.8", "1,056 threads in a block, at most 1,024"),
        (255, 512, "9.1", "130,560 registers in a block, at most 65,536; PTX 9.1, at most 8.8"),
    ],
)
def test_each_limit_has_a_number(
    registers: int, threads: int, version: str, found: str | None
) -> None:
    resources = Resources(registers, 0, 0, 0)
    kernel = CompiledKernel("f", "sm_90a", f".version {version}\n", b"", threads, 0, resources)
    match = f"f: takes more than sm_90a has: {found}"
    with nullcontext() if found is None else pytest.raises(DflashError, match=match):
        check_limits(kernel)


def test_scratch_pointers_leave_the_entry() -> None:
    kept = drop_scratch_pointers(ENTRY, 2)
    assert entry_parameters(kept) == ("f", ["u64", "u32"])
    assert kept.endswith(ENTRY[ENTRY.index(".reqntid") :])


@pytest.mark.parametrize(
    ("ptx", "message"),
    [
        (ENTRY.replace("[f_param_0]", "[f_param_2]"), "uses f_param_2, which nobody passes"),
        (ENTRY.replace(".param .u32 f_param_1,\n", ""), "3 parameters where 2 arguments"),
        (ENTRY + ENTRY, "PTX has 2 entries"),
    ],
)
def test_an_entry_that_is_not_as_expected_is_refused(ptx: str, message: str) -> None:
    with pytest.raises(DflashError, match=message):
        drop_scratch_pointers(ptx, 2)


def test_the_command_prints_a_row_for_each_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compilation, "main_cases", lambda: main_cases(["accept"]))
    arguments = ["--arch", "sm_120a,sm_90a", "-o", str(tmp_path)]
    shown = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert [line.split()[:2] for line in shown.output.splitlines()] == [
        ["sm_120a", "accept"],
        ["sm_90a", "accept"],
    ]
    rows = json.loads(CliRunner().invoke(main, [*arguments, "--json"]).output)
    assert {row["arch"] for row in rows} == {"sm_120a", "sm_90a"}
    assert {(row["sass"]["local_accesses"], *row["sass"]["mma"]) for row in rows} == {(0,)}
    suffixes = sorted(path.suffix for path in tmp_path.iterdir())
    assert suffixes == sorted([".cubin", ".json", ".ptx"] * 2)


def test_what_the_command_cannot_do_is_said(tmp_path: Path) -> None:
    """An unknown architecture before anything is compiled for those that are known."""
    refused = CliRunner().invoke(main, ["--arch", "sm_90a,sm_80", "-o", str(tmp_path / "out")])
    known = "sm_90a, sm_100a, sm_103a, sm_120a"
    assert refused.output == f"Error: --arch: 'sm_80' is none of {known}\n"
    assert refused.exit_code == 2 and not (tmp_path / "out").exists()
    (tmp_path / "file").write_text("")
    refused = CliRunner().invoke(main, ["--arch", "sm_90a", "-o", str(tmp_path / "file" / "below")])
    assert (refused.exit_code, "file/below: Not a directory" in refused.output) == (1, True)

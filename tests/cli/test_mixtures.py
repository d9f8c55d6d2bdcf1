"""A mixture of experts from the command line: built, shown, and its MXFP4 experts converted."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_trt.models.folder import open_checkpoint
from tests.cli.conftest import Build, Run
from tests.reference.checkpoints import write_target

DEMO = "demo-gpt-oss"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mxfp4") / "source"
    return write_target(folder, "gpt_oss", "bfloat16", num_layers=4, mxfp4=True)


def test_the_line_and_the_json(run: Run, source: Path, tmp_path: Path) -> None:
    arguments = ["quantize", "--checkpoint", source, "--precision", "nvfp4"]
    shown = run.well(*arguments, "-o", tmp_path / "q")
    described = run(*arguments, "--json", "-o", tmp_path / "j").json
    blocks = 4 * 8 * (2 * 96 * 64 + 64 * 96) // 16
    assert (described["exact_blocks"], described["requantized_blocks"]) == (blocks, 0)
    assert len(described["tensors"]) == 8
    assert f"8 tensors, {blocks:,} blocks of 16 exact, 0 quantized again" in shown.out
    assert described["tensors"].keys() < open_checkpoint(tmp_path / "q").tensors.keys()


def test_a_build_says_how_experts_are_converted(build: Build) -> None:
    refused = build(DEMO, "--precision", "nvfp4")
    refused.fails(1, "write it with `dflash-trt quantize`")


@pytest.mark.parametrize("precision", ["nvfp4", "bf16"])
def test_a_bundle_says_what_its_experts_are_in(
    run: Run, build: Build, tmp_path: Path, precision: str
) -> None:
    quantize = ["quantize", "--checkpoint", "demo_pair/gpt_oss/target", "--precision", precision]
    run.well(*quantize, "-o", tmp_path / "q")
    built = build(DEMO, "--target-checkpoint", tmp_path / "q")
    shown = run("inspect", build.folder).out
    assert ("quantised target: experts in NVFP4; excluded" in built.out) == (precision == "nvfp4")
    formats = {"nvfp4": "BF16/NVFP4", "bf16": "BF16"}[precision]
    assert f"585,188 parameters in {formats}, vocabulary" in shown
    assert "no linear quantised" not in built.out + shown

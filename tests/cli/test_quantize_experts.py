"""`dflash-trt quantize` of a checkpoint with MXFP4 experts."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_trt.checkpoints.folder import open_checkpoint
from tests.cli.conftest import Run
from tests.reference.checkpoints import write_target


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mxfp4") / "source"
    return write_target(folder, "gpt_oss", "bfloat16", num_layers=4, mxfp4=True)


def test_the_line_and_the_json(run: Run, source: Path, tmp_path: Path) -> None:
    arguments = ["quantize", "--checkpoint", source, "--precision", "nvfp4"]
    shown = run(*arguments, "-o", tmp_path / "q")
    assert shown.code == 0, shown.err
    described = run(*arguments, "--json", "-o", tmp_path / "j").json
    blocks = 4 * 8 * (2 * 96 * 64 + 64 * 96) // 16
    assert (described["exact_blocks"], described["requantized_blocks"]) == (blocks, 0)
    assert len(described["tensors"]) == 8
    assert f"8 tensors, {blocks:,} blocks of 16 exact, 0 quantized again" in shown.out
    assert described["tensors"].keys() < open_checkpoint(tmp_path / "q").tensors.keys()


def test_bf16_is_larger(run: Run, source: Path, tmp_path: Path) -> None:
    arguments = ["quantize", "--checkpoint", source, "--precision", "bf16", "--json"]
    described = run(*arguments, "-o", tmp_path / "q").json
    assert described["bytes"] > described["source_bytes"]
    assert described["requantized_blocks"] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--precision", "fp8"], "MXFP4 experts, which become nvfp4 or bf16"),
        (["--precision", "nvfp4", "--exclude", "*"], "error: --exclude: is not for a checkpoint"),
        (["--precision", "nvfp4", "--quantize-lm-head"], "error: --quantize-lm-head: is not for"),
    ],
)
def test_what_does_not_apply_is_refused(
    run: Run, source: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    refused = run("quantize", "--checkpoint", source, *arguments, "-o", tmp_path / "q")
    assert refused.code == 2
    assert message in refused.err
    assert not list(tmp_path.iterdir())


def test_experts_in_floating_point_are_refused(run: Run, tmp_path: Path) -> None:
    folder = write_target(tmp_path / "m", "qwen3_moe", "bfloat16", num_layers=4, shards=1)
    texts = tmp_path / "texts.jsonl"
    texts.write_text('{"prompt": "a"}\n')
    arguments = ["quantize", "--checkpoint", folder, "--precision", "nvfp4"]
    refused = run(*arguments, "--calibration", texts, "-o", tmp_path / "q")
    assert refused.code == 1 and "has experts in floating point" in refused.err
    assert not (tmp_path / "q").exists()


def test_a_build_says_how_experts_are_converted(run: Run, tmp_path: Path) -> None:
    refused = run("build", "--target", "demo-gpt-oss", "--precision", "nvfp4", "-o", tmp_path / "b")
    assert refused.code == 1 and "write it with `dflash-trt quantize`" in refused.err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("precision", ["nvfp4", "bf16"])
def test_a_bundle_says_what_its_experts_are_in(run: Run, tmp_path: Path, precision: str) -> None:
    quantize = ["quantize", "--checkpoint", "demo_pair/gpt_oss/target", "--precision", precision]
    assert run(*quantize, "-o", tmp_path / "q").code == 0
    build = ["build", "--target", "demo-gpt-oss", "--target-checkpoint", tmp_path / "q"]
    built = run(*build, "-o", tmp_path / "b")
    shown = run("inspect", tmp_path / "b").out
    assert ("quantised target: experts in NVFP4; excluded" in built.out) == (precision == "nvfp4")
    formats = {"nvfp4": "BF16/NVFP4", "bf16": "BF16"}[precision]
    assert f"585,188 parameters in {formats}, vocabulary" in shown
    assert "no linear quantised" not in built.out + shown


def test_floating_point_checkpoints_need_texts(
    run: Run, bigram_config: Path, tmp_path: Path
) -> None:
    checkpoint = bigram_config.parent / "target"
    arguments = ["quantize", "--checkpoint", checkpoint, "-o", tmp_path / "q", "--precision"]
    missing = run(*arguments, "nvfp4")
    assert missing.code == 2 and "error: --calibration: input scales come from texts" in missing.err
    decoded = run(*arguments, "bf16")
    assert decoded.code == 2 and "--precision bf16 is for checkpoints in MXFP4" in decoded.err

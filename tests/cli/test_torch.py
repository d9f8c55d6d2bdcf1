"""`build --executor torch`, and the commands over what it builds, on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Build, Run
from tests.covering import exhaustive

TORCH = ("--executor", "torch", "--max-batch", "2")
PROMPTS = '{"prompt": "a"}\n{"prompt": "bb"}\n'


@pytest.mark.parametrize("precision", ["fp32", exhaustive("bf16")])
def test_commands_run_a_pair_over_pytorch(
    precision: str,
    build: Build,
    run: Run,
    engine_config: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dflash_trt.decoding.tuning.block_times.STEPS_SECONDS", 0.0)
    build.well(engine_config, *TORCH, "--precision", precision)
    bundle, one = build.folder, ("--threads", "1")
    assert build.manifest["executor"] == "torch" and build.manifest["engines"] is None
    told = run.well("generate", bundle, "--prompt", "b", "--max-tokens", 10, "--json", *one).json
    assert told["text"] == "ababababab"
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(PROMPTS)
    asked = ("--prompts", prompts, *one)
    run.well("verify", bundle, "--max-tokens", 12, *asked)
    run.well("tune", bundle, "--max-tokens", 60, "--block-size", 2, "--batch", 1, *asked)
    assert "for executor torch" in run.well("inspect", bundle).out
    run.well("package", bundle, "-o", tmp_path / "models")
    run("diagnose", bundle, *asked).fails(2, "was built for torch; answers are replayed on the CPU")


@pytest.mark.parametrize(
    ("options", "piece"),
    [
        (("--precision", "int8"), "--precision"),
        (("--arch", "sm_90"), "PyTorch runs one bundle on every GPU"),
        (("--plugins",), "uses this project's kernels anyway"),
    ],
)
def test_what_pytorch_has_no_use_for_is_refused(
    options: tuple[str, ...], piece: str, build: Build, engine_config: Path
) -> None:
    build(engine_config, *TORCH, *options).fails(2, piece)

"""What fits on a GPU and what does not; tests/frozen has the other combinations' refusals."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_trt.models.build_config import load_config
from tests.trtllm.conftest import QWEN3, Run, write_schedule

POSITIONS = 32768 + 16
LAYERS, KV_HEADS, HEAD_DIM, BF16 = 5, 8, 128, 2


def _refused(run: Run, tmp_path: Path, *options: object) -> str:
    output = tmp_path / "deployment"
    outcome = run("build", "--executor", "trtllm", *options, "-o", output)
    assert not output.exists() and not list(tmp_path.glob(".deployment*"))
    return outcome.fails(2)


def _own(tmp_path: Path, profile: str, name: str = "qwen3-8b") -> list[object]:
    """Options for a copy of a shipped configuration with one profile of its own."""
    path = tmp_path / "own.yaml"
    shipped = load_config(name)[0]
    path.write_text(
        f"description: own\ntarget: {{checkpoint: {shipped.target.checkpoint}}}\n"
        f"draft: {{checkpoint: {shipped.draft.checkpoint}}}\nprofiles:\n  own: {{{profile}}}\n"
    )
    return ["--target", path]


@pytest.mark.parametrize(
    ("name", "profile", "options", "piece"),
    [
        ("qwen3-8b", "gpu: h200", ["--attention-backend", "TRTLLM"], "choose FA4"),
        ("qwen3-8b", "gpu: l40s, precision: nvfp4", [], "choose fp8"),
        ("llama-3.1-8b", "gpu: b300, max_seq_len: 65536", [], "pass --max-seq-len 40960 or less"),
        # 128 experts, 32 heads and 4 KV heads can be split so.
        (
            "qwen3-coder-30b-a3b",
            "gpu: b200, gpus: 16, tensor_parallel: 16, expert_parallel: 16",
            ["--block-size", 17],
            "trained block of 16",
        ),
        (
            "gpt-oss-120b",
            "gpu: rtx-5090",
            [],
            "the weights take 66,737,479,680 bytes a GPU, of 32,000,000,000",
        ),
        (
            "qwen3.5-27b",
            "gpu: h100, max_batch: 4, max_seq_len: 8192",
            [],
            # 31 states of 48 layers, in float32, and what each convolution keeps in bf16.
            f"{4 * 31 * 48 * (4 * 48 * 128 * 128 + 2 * 3 * 10240):,} the recurrent states",
        ),
        (
            "qwen3.5-27b",
            "gpu: h100, gpus: 32, tensor_parallel: 32",
            [],
            "attention heads",
        ),
        (
            "qwen3-8b",
            "gpu: b200, max_batch: 512, max_seq_len: 32768",
            ["--attention-backend", "VANILLA"],
            f"{(512 + 1) * POSITIONS * LAYERS * 2 * KV_HEADS * HEAD_DIM * BF16:,} bytes a GPU",
        ),
    ],
)
def test_profiles(
    run: Run, tmp_path: Path, name: str, profile: str, options: list[object], piece: str
) -> None:
    assert piece in _refused(run, tmp_path, *_own(tmp_path, profile, name), *options)


def test_the_batch_that_it_names_fits(run: Run, tmp_path: Path) -> None:
    own = [*_own(tmp_path, "gpu: rtx-5090, max_seq_len: 4096"), "--max-batch"]
    line = _refused(run, tmp_path, *own, 1024)
    most = int(line.split("--max-batch ")[1].split()[0])
    assert 16 < most < 128
    _refused(run, tmp_path, *own, most + 1)
    run.well("build", "--executor", "trtllm", *own, most, "-o", tmp_path / "fits")


def test_a_schedule_is_somebody_elses_measurement(run: Run, tmp_path: Path) -> None:
    path = write_schedule(tmp_path / "schedule.json", [(4, 16)], executor="c\npu")
    built = run.well(*QWEN3, "--block-schedule", path, "-o", tmp_path / "deployment")
    assert "measured on executor c pu, not with TensorRT-LLM on B200 (HGX)\n" in built.err

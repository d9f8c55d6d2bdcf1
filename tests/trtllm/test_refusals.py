"""Wrong combinations: one line that says what does not go together, and nothing written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from dflash_trt.config import load_config
from tests.trtllm.conftest import Run
from tests.trtllm.schedules import write_schedule

B200 = ["--target", "qwen3-8b", "--profile", "b200x1"]
OSS = ["--target", "gpt-oss-120b", "--profile", "b300x8"]
HOPPER = "  {gpu: h200, max_batch: 4, max_seq_len: 8192}\n"


def _refused(run: Run, tmp_path: Path, *options: object, pieces: Sequence[str] = ()) -> str:
    output = tmp_path / "deployment"
    outcome = run("build", "--executor", "trtllm", *options, "-o", output)
    assert not output.exists() and not list(tmp_path.glob(".deployment*"))
    return outcome.fails(2, *pieces)


@pytest.mark.parametrize(
    ("options", "pieces"),
    [
        (["--target", "gpt-oss-120b"], ["which profile of gpt-oss-120b.yaml", "b300x8, b300x1"]),
        ([*OSS[:2], "--profile", "b300x9"], ["no profile 'b300x9'", "(nearest: 'b300x8')"]),
        (["--target", "demo"], ["demo.yaml has no hardware profiles"]),
        ([*B200, "--block-size", 17], ["block size 17", "trained block of 16", "--block-size 16"]),
        ([*B200, "--attention-backend", "FA4"], ["FA4 does not run on B200", "choose TRTLLM"]),
        (
            [*OSS[:2], "--profile", "rtx-pro-6000x1", "--attention-backend", "TRTLLM"],
            ["TRTLLM does not run on RTX PRO 6000", "sm_103 and sm_100", "choose VANILLA"],
        ),
        (
            [*B200, "--attention-backend", "VANILLA", "--max-batch", 512],
            [
                f"{(512 + 1) * (32768 + 16) * 5 * 8 * 128 * 2 * 2:,} bytes a GPU",
                "180,000,000,000",
                "pass --max-batch 146 or less",
            ],
        ),
        ([*B200, "--max-seq-len", 50000], ["exceeds the 40960 positions"]),
        ([*B200, "--trtllm-version", "1.4.0rc2"], ["'1.4.0rc2'", "(nearest: '1.4.0rc1')"]),
        (
            [*B200, "--trtllm-version", "1.3.0rc27", "--context-recompute-tail", 64],
            ["1.3.0rc27 has no context_recompute_tail"],
        ),
        ([*B200, "--precision", "fp16"], ["--precision", "fp8 or nvfp4"]),
        ([*B200, "--draft-precision", "bf16"], ["--draft-precision", "does nothing"]),
        ([*B200, "--precision", "fp8"], ["--calibration"]),
        ([*B200, "--exclude", "x"], ["--exclude", "does nothing"]),
        ([*B200, "--arch", "sm_100"], ["--arch", "does nothing"]),
        ([*B200, "--hash-weights"], ["--hash-weights", "does nothing"]),
        ([*B200, "--plugins"], ["--plugins", "does nothing"]),
        ([*B200, "--copy-weights"], ["--copy-weights", "names on the hub"]),
        (
            [*OSS, "--precision", "nvfp4", "--calibration", "demo_pair/prompts.jsonl"],
            ["b300x8: the target is quantized already, in mxfp4", "`dflash-trt quantize`"],
        ),
        ([*B200, "--eagle-checkpoint", "./nowhere"], ["there is no such checkpoint folder"]),
        ([*B200, "--target-checkpoint", "nowhere"], ["--target-checkpoint", "no such folder"]),
        ([*B200, "--block-schedule", "nowhere.json"], ["nowhere.json", "no such file"]),
    ],
)
def test_combinations(run: Run, tmp_path: Path, options: list[object], pieces: list[str]) -> None:
    _refused(run, tmp_path, *options, pieces=pieces)


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
    ("profile", "options", "pieces"),
    [
        ("gpu: h200", ["--attention-backend", "TRTLLM"], ["H200 SXM (sm_90)", "choose FA4"]),
        ("gpu: h2000", [], ["own.yaml, profile own", "'h2000'", "(nearest: 'h200')"]),
        (
            "gpu: b200, gpus: 3, tensor_parallel: 3",
            [],
            ["own.yaml, profile own: tensor_parallel 3", "32 attention heads"],
        ),
        (
            "gpu: b200, gpus: 2, tensor_parallel: 2, expert_parallel: 2",
            [],
            ["expert_parallel 2 is for mixtures of experts"],
        ),
        ("gpu: h100, precision: nvfp4", [], ["H100 SXM (sm_90) does not multiply in nvfp4"]),
        ("gpu: l40s, precision: nvfp4", [], ["L40S (sm_89) does not mult", "choose fp8"]),
        ("gpu: rtx-5090, max_seq_len: 40000", ["--max-batch", 64], ["lower --max-seq-len"]),
        ("gpu: b200, gpus: 4", [], ["tensor_parallel 1 is not gpus 4"]),
        ("gpu: b200, gpus: 2, tensor_parallel: 2, nodes: 3", [], ["leave some with fewer"]),
        (
            "gpu: b200, gpus: 4, tensor_parallel: 4, expert_parallel: 3",
            [],
            ["profiles.own: expert_parallel 3 does not divide tensor_parallel 4"],
        ),
        ("gpu: b200, tensor_paralel: 1", [], ["'profiles.own.tensor_paralel'", "tensor_parallel"]),
    ],
)
def test_profiles(
    run: Run, tmp_path: Path, profile: str, options: list[object], pieces: list[str]
) -> None:
    _refused(run, tmp_path, *_own(tmp_path, profile), *options, pieces=pieces)


def test_experts_and_small_gpus(run: Run, tmp_path: Path) -> None:
    split = "gpu: b200, gpus: 16, tensor_parallel: 16, expert_parallel: 16"
    line = _refused(
        run, tmp_path, *_own(tmp_path, split, "qwen3-coder-30b-a3b"), "--block-size", 17
    )
    assert "trained block of 16" in line  # 128 experts, 32 heads and 4 KV heads can be split so
    line = _refused(run, tmp_path, *_own(tmp_path, "gpu: rtx-5090", "gpt-oss-120b"))
    assert "the weights take 66,737,479,680 bytes a GPU, of 32,000,000,000" in line


def test_the_batch_that_it_names_fits(run: Run, tmp_path: Path) -> None:
    own = [*_own(tmp_path, "gpu: rtx-5090, max_seq_len: 4096"), "--max-batch"]
    line = _refused(run, tmp_path, *own, 1024)
    most = int(line.split("--max-batch ")[1].split()[0])
    assert 16 < most < 128
    _refused(run, tmp_path, *own, most + 1)
    build = ["build", "--executor", "trtllm", *own, most, "-o", tmp_path / "fits"]
    assert run(*build).code == 0


@pytest.mark.parametrize(
    ("blocks", "pieces"),
    [
        ([(4, 8), (64, 1)], ["begins with 7 drafts (block 8)", "pass --block-size 8"]),
        ([(4, 1), (64, 1)], ["does without speculation at every batch"]),
        ([(8, 16), (4, 8)], ["ascending order of max_batch"]),
        ([], ["blocks"]),
    ],
)
def test_schedules(
    run: Run, tmp_path: Path, blocks: list[tuple[int, int]], pieces: list[str]
) -> None:
    path = write_schedule(tmp_path / "schedule.json", blocks)
    _refused(run, tmp_path, *B200, "--block-schedule", path, pieces=[str(path), *pieces])


def test_a_schedule_is_somebody_elses_measurement(run: Run, tmp_path: Path) -> None:
    path = write_schedule(tmp_path / "schedule.json", [(4, 16)], executor="c\npu")
    build = ["build", "--executor", "trtllm", *B200, "--block-schedule", path]
    built = run(*build, "-o", tmp_path / "deployment")
    assert built.code == 0
    assert "measured on executor c pu, not with TensorRT-LLM on B200 (HGX)\n" in built.err


def test_other_executors_have_no_such_options(run: Run, tmp_path: Path) -> None:
    for option, value in [("--block-schedule", "x"), ("--trtllm-version", "1.4.0rc1")]:
        run("build", "--target", "demo", option, value).fails(2, option, "--executor trtllm")
    rtx = ["build", "--target", "gpt-oss-120b", "--executor", "tensorrt-rtx", "--profile"]
    run("build", "--target", "qwen3-8b", "--profile", "b200x1").fails(2, "profiles describe GPUs")
    run(*rtx, "b300x8").fails(2, "has 8 GPUs; engines run on one")
    run(*rtx, "rtx-pro-6000x1", "--arch", "sm_89").fails(2, "is for sm_120, --arch says sm_89")
    run(*rtx, "b200x1").fails(2, "no TensorRT-RTX engines for 'sm_100'")

"""Two processes that `accelerate launch` starts train the draft that one process trains."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from dflash_trt.core.machine import multiplies_bf16
from tests.frozen.command_line import run_well
from tests.training.prompts import command, write_prompts
from tests.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.exhaustive


def launch(words: list[str]) -> subprocess.Popen[str]:
    """The command in two processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    # It is for several GPUs; for processes on a CPU accelerate would want MPI.
    options = ["--multi_gpu", "--num_processes", "2", "--main_process_port", port]
    return subprocess.Popen(
        [sys.executable, "-m", "accelerate.commands.launch", *options, "-m", "dflash_trt", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _first_process(launcher: int) -> int:
    """The process id of rank 0 among the launcher's children."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    (first,) = [
        int(child)
        for child in children
        if b"RANK=0" in Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
    ]
    return first


def test_a_killed_crew_goes_on_to_what_one_process_trains(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl", 24)
    alone = run_well(*command(prompts, tmp_path / "alone", "--device", "cpu", "--json")).json
    words = command(prompts, tmp_path / "draft", "--device", "cpu", "--json")
    killed = launch(words)
    work = tmp_path / ".draft.work"
    wait_until(lambda: any(work.glob("train-*/trainer.pt")) or killed.poll() is not None)
    os.kill(_first_process(killed.pid), signal.SIGKILL)
    killed.communicate(timeout=PATIENCE_S)  # the other one ends too
    assert killed.returncode != 0 and not (tmp_path / "draft").exists()

    again = launch(words)
    out, err = again.communicate(timeout=PATIENCE_S)
    assert again.returncode == 0, err
    told = json.loads(out)  # of the first process; the other says nothing
    assert told["reasons"]["processes"].startswith("2 were started")
    for one, other in zip(told["evaluations"], alone["evaluations"], strict=True):
        assert (one["step"], one["tokens"]) == (other["step"], other["tokens"])
        # Gradients add up in another order; where products are bfloat16, that is seen sooner.
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-2 if multiplies_bf16() else 1e-3)
        assert one["acceptance_length"] == pytest.approx(other["acceptance_length"], abs=0.05)
    mine, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("draft", "alone"))
    for name, weight in theirs.items():  # bfloat16: a last bit may fall the other way
        assert mine[name].float().sub(weight.float()).abs().max() <= weight.float().abs().max() / 64


def test_what_is_refused_is_said_once(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl", 24)
    for more, what in (
        (["--online"], "--online: does not go with 2 processes"),
        (["--batch-rows", 1], "2 processes share a batch of 1 rows; give --batch-rows 2 or more"),
    ):
        refused = launch(command(prompts, tmp_path / "draft", "--device", "cpu", *more))
        _, err = refused.communicate(timeout=PATIENCE_S)
        errors = [line for line in err.splitlines() if line.startswith("error: ")]
        assert refused.returncode != 0 and len(errors) == 1 and what in errors[0], err
        assert "Traceback (most recent call last)" not in err.partition("error: ")[0]
    assert {path.name for path in tmp_path.iterdir()} == {"prompts.jsonl"}

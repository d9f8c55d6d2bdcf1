"""`make real`, every step of it as the Makefile has it, on fewer prompts and tokens."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

from dflash_trt.bundle.bundle import open_bundle
from dflash_trt.decoding.tuning.break_even import own_schedule
from dflash_trt.serving.server.tritonserver import TritonServerBinary
from tests.real_pair.checkpoint import CHECKPOINT, REAL_PAIR, ROOT

pytestmark = REAL_PAIR

SHORTER = {
    "build": "",
    "generate": "--max-tokens 12",
    "verify": "--limit-prompts 1 --max-tokens 12 --repeats 1",
    "tune": "--limit-prompts 4 --max-tokens 48 --block-size 4 --batch 1",
    "served-demo": "--osl 8 --concurrency 1 --blocks 4 --output-dir",
}
"""What a step is given beside its own options; the last of an option counts."""


def test_every_step_of_make_real(tmp_path: Path, tritonserver: TritonServerBinary) -> None:
    bundle, output = tmp_path / "bundle", tmp_path / "output"
    steps = _steps(bundle)
    assert [_name(step) for step in steps] == list(SHORTER)
    said = {}
    for step in steps:
        name = _name(step)
        words = [*step, *SHORTER[name].split(), *[str(output)] * (name == "served-demo")]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{name}: {done.stderr[-2000:]}"
        said[name] = done.stdout
    assert "134,515,008 parameters" in said["build"]
    assert len(said["generate"].split()) > 5
    assert said["verify"].count(" identical: ") == 3 and "acceptance length" in said["verify"]
    assert own_schedule(open_bundle(bundle)) is not None
    report = (output / "report.html").read_text("utf-8")
    assert all(name in report for name in ("target_only", "DFlash, block 4", "DFlash, tuned"))


def _steps(bundle: Path) -> list[list[str]]:
    """The commands of `make real` that work on the bundle, as words."""
    folders = [f"BIN={Path(sys.executable).parent}", f"SMOLLM2={CHECKPOINT}", f"REAL={bundle}"]
    lines = subprocess.run(
        ["make", "--no-print-directory", "-n", "real", *folders],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    steps = [shlex.split(line) for line in lines if str(bundle) in line]
    return [step for step in steps if step[0] != "echo"]


def _name(step: list[str]) -> str:
    return step[step.index("bench") + 1] if "bench" in step else step[1]

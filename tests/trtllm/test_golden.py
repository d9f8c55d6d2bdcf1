"""Deployments to the byte. `python -m tests.trtllm.test_golden` writes the files anew."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest

from dflash_trt import __version__
from dflash_trt.cli.main import main
from tests.trtllm.conftest import write_schedule

GOLDEN = Path(__file__).parent / "golden"
BLOCKS = [(4, 16), (16, 8), (64, 1)]
CASES: dict[tuple[str, str], list[str]] = {
    ("gpt-oss-120b", "b300x8"): ["--llm-arg", "cache_transceiver_config.backend=NIXL"],
    ("qwen3-8b", "h100x1"): [
        *("--trtllm-version", "1.4.0rc1"),
        *("--llm-arg", "speculative_config.context_recompute_tail=2048"),
    ],
    ("qwen3-8b", "b200x1"): ["--block-schedule", "SCHEDULE"],
    ("qwen3-coder-30b-a3b", "rtx-pro-6000x1"): [],
    ("qwen3.5-27b", "h200x1"): [],
}


def _write(case: tuple[str, str], folder: Path) -> dict[str, str]:
    """The files of a deployment, by path, without this project's version."""
    schedule = write_schedule(folder / "block_schedule.json", BLOCKS)
    target, profile = case
    options = [str(schedule) if one == "SCHEDULE" else one for one in CASES[case]]
    output = folder / "-".join(case)
    common = ["build", "--executor", "trtllm", "--target", target, "--profile", profile]
    assert main([*common, *options, "-o", str(output)]) == 0
    name = f"dflash-trt {__version__}"
    files = _read(output)
    del files["preflight.py"]  # test_scripts.py runs it
    return {path: text.replace(name, "dflash-trt VERSION") for path, text in files.items()}


def _read(folder: Path) -> dict[str, str]:
    """Every file's text, by its path below `folder`."""
    return {
        path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8")
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_every_file(case: tuple[str, str], tmp_path: Path) -> None:
    written = _write(case, tmp_path)
    golden = _read(GOLDEN / "-".join(case))
    assert written.keys() == golden.keys()
    for name, text in golden.items():
        assert written[name] == text, name
        # In a container without a locale, Python reads files as ASCII.
        assert text.isascii() or Path(name).suffix not in (".yaml", ".pbtxt", ".sh", ".py"), name


if __name__ == "__main__":
    shutil.rmtree(GOLDEN, ignore_errors=True)
    for pair in CASES:
        golden = GOLDEN / "-".join(pair)
        with tempfile.TemporaryDirectory() as temporary:
            for path, text in _write(pair, Path(temporary)).items():
                (golden / path).parent.mkdir(parents=True, exist_ok=True)
                (golden / path).write_text(text, encoding="utf-8")

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
CASES = {
    "gpt-oss-120b-b300x8": [],
    "qwen3-8b-b200x1": ["--trtllm-version", "1.3.0rc27", "--block-schedule", "SCHEDULE"],
}


def _write(case: str, folder: Path) -> dict[str, str]:
    """The files of a deployment, by path, without this project's version."""
    schedule = write_schedule(folder / "block_schedule.json", BLOCKS)
    target, profile = case.rsplit("-", 1)
    options = [str(schedule) if one == "SCHEDULE" else one for one in CASES[case]]
    output = folder / case
    common = ["build", "--executor", "trtllm", "--target", target, "--profile", profile]
    assert main([*common, *options, "-o", str(output)]) == 0
    name = f"dflash-trt {__version__}"
    files = _read(output).items()
    return {path: text.replace(name, "dflash-trt VERSION") for path, text in files}


def _read(folder: Path) -> dict[str, str]:
    """Every file's text, by its path below `folder`."""
    return {
        path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8")
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize("case", CASES)
def test_every_file(case: str, tmp_path: Path) -> None:
    written = _write(case, tmp_path)
    golden = _read(GOLDEN / case)
    assert written.keys() == golden.keys()
    for name, text in golden.items():
        assert written[name] == text, name
        # In a container without a locale, Python reads files as ASCII.
        assert text.isascii() or Path(name).suffix not in (".yaml", ".pbtxt", ".sh"), name


if __name__ == "__main__":
    for name in CASES:
        shutil.rmtree(GOLDEN / name, ignore_errors=True)
        with tempfile.TemporaryDirectory() as temporary:
            for path, text in _write(name, Path(temporary)).items():
                (GOLDEN / name / path).parent.mkdir(parents=True, exist_ok=True)
                (GOLDEN / name / path).write_text(text, encoding="utf-8")

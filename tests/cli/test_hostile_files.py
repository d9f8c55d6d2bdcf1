"""Files that lie about what they are, at every command that reads one: one line, nothing copied."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Build, Run
from tests.waiting import PATIENCE_S

LINKED = "is a link out of its folder"
SECRET = "an API key"


def _replace_by_link(path: Path, outside: Path) -> None:
    """Puts a link to a file elsewhere, with what was there or a secret."""
    content = path.read_bytes() if path.exists() else SECRET.encode()
    path.unlink(missing_ok=True)
    outside.write_bytes(content)
    path.symlink_to(outside)


def _truncate(path: Path, size: int) -> None:
    with path.open("ab") as sparse:
        sparse.truncate(size)


@pytest.mark.parametrize(
    "name",
    [
        "target/chat_template.jinja",
        "target/generation_config.json",
        "target/model.safetensors",
        "draft/hf_quant_config.json",
    ],
)
def test_a_checkpoint_with_a_link_is_not_built(
    build: Build, own_pair: Path, tmp_path: Path, name: str
) -> None:
    _replace_by_link(own_pair.parent / name, tmp_path / "outside")
    assert SECRET not in build(own_pair).fails(1, Path(name).name, LINKED)


@pytest.fixture
def copy(bundle: Path, tmp_path: Path) -> Path:
    return shutil.copytree(bundle, tmp_path / "copy")


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("package", "manifest.json"),
        ("package", "prompts.jsonl"),
        ("package", "weights/target/config.json"),
        ("generate", "target.onnx"),
        ("generate", "tokenizer/tokenizer.json"),
        ("generate", "weights/target/shard-00000.safetensors"),
    ],
)
def test_a_bundle_with_a_link_is_not_used(
    run: Run, copy: Path, tmp_path: Path, name: str, command: str
) -> None:
    _replace_by_link(copy / name, tmp_path / "outside")
    options = {"package": ["-o", tmp_path / "r"], "generate": ["--prompt", "cab"]}[command]
    run(command, copy, *options).fails(1, Path(name).name, LINKED)
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    ("make", "piece"),
    [
        (os.mkfifo, "is a pipe"),
        (lambda path: path.symlink_to("/dev/zero"), "is a device"),
        (lambda path: _truncate(path, 200 << 20), "too large for a file of prompts"),
    ],
    ids=["pipe", "device", "sparse"],
)
def test_prompts_that_never_end(
    run: Run, bundle: Path, tmp_path: Path, make: Callable[[Path], object], piece: str
) -> None:
    path = tmp_path / "prompts.txt"
    make(path)
    run("generate", bundle, "--prompt-file", path).fails(2, "prompts.txt", piece)
    run("verify", bundle, "--prompts", path).fails(2, "prompts.txt", piece)


def test_a_pipe_is_not_inspected(run: Run, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    run("inspect", tmp_path / "pipe").fails(2, "pipe")
    os.mkfifo(tmp_path / "manifest.json")
    run("inspect", tmp_path).fails(1, "manifest.json", "is a pipe")


@pytest.mark.parametrize("name", ["a\ud800", "a\0b"])
def test_a_name_that_no_file_can_have(run: Run, bundle: Path, name: str) -> None:
    for command in (["generate", bundle, "--prompt-file"], ["import-gguf"], ["inspect"]):
        run(*command, name).fails(2, "can be no path")


def test_a_long_output_is_whole_in_a_pipe_that_does_not_wait(bundle: Path, tmp_path: Path) -> None:
    """As some parents leave it: 60,000 prompts gave JSON that ended at 64 KiB."""
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "ab"}\n' * 150)
    arguments = ["generate", bundle, "--prompt-file", prompts, "--max-tokens", "1", "--json"]
    code = "import sys; from dflash_trt.cli.main import main; sys.exit(main(sys.argv[1:]))"
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    process = subprocess.Popen([sys.executable, "-c", code, *map(str, arguments)], stdout=writing)
    os.close(writing)
    with os.fdopen(reading, "rb") as output:
        select.select([output], [], [], PATIENCE_S)
        time.sleep(0.2)  # it is full now
        assert len(json.loads(output.read())["requests"]) == 150
    assert process.wait(PATIENCE_S) == 0

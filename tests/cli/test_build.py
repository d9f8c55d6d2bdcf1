"""`build`: what it writes where, and what it must find out before it writes or downloads.

Checkpoints, configurations and options that it refuses are in tests/frozen.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from tests.cli.conftest import Outcome, Run


@pytest.fixture
def build(run: Run, own_pair: Path, tmp_path: Path) -> Callable[..., Outcome]:
    """Builds `own_pair` to tmp_path/out/b."""

    def call(*arguments: object) -> Outcome:
        return run("build", "--target", own_pair, "-o", tmp_path / "out" / "b", *arguments)

    return call


def test_a_build(build: Callable[..., Outcome], tmp_path: Path) -> None:
    outcome = build()
    assert outcome.code == 0
    assert outcome.out == (
        f"{tmp_path}/out/b: qwen3 target of 6 layers (103,840 parameters), "
        "DFlash draft of 2 (34,208), block 8, weights linked\n"
    )
    assert "linking weights" in outcome.err and "graphs" in outcome.err
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["b"]


def test_options_override_the_configuration(build: Callable[..., Outcome], tmp_path: Path) -> None:
    assert build("--max-batch", 2, "--max-seq-len", 100, "--block-size", 4).code == 0
    manifest = json.loads((tmp_path / "out" / "b" / "manifest.json").read_text())
    assert manifest["limits"] == {
        "max_batch": 2,
        "max_seq_len": 100,
        "block_size": 4,
        "prefill_chunk": 100,
    }


def test_checkpoint_folders_override_the_configuration(
    run: Run, own_pair: Path, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    shutil.move(own_pair.parent / "target", elsewhere / "t")
    shutil.move(own_pair.parent / "draft", elsewhere / "d")
    folders = ["--target-checkpoint", elsewhere / "t", "--draft-checkpoint", elsewhere / "d"]
    run.well("build", "--target", own_pair, "-o", tmp_path / "b", *folders)


def test_the_default_output_is_here(
    run: Run, own_pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    run.well("build", "--target", own_pair)
    assert (tmp_path / "here" / "pair-bundle" / "manifest.json").is_file()


def test_a_hub_name_without_a_network(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def fail(name: str, **options: Any) -> None:
        asked.append(name)
        assert all(
            "bin" not in pattern and "py" not in pattern for pattern in options["allow_patterns"]
        )
        raise ConnectionError("Temporary failure in name resolution\n(try again)")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    run("build", "--target", "qwen3-8b", "-o", tmp_path / "b").fails(
        1, "Qwen/Qwen3-8B", "name resolution (try again)", "--target-checkpoint"
    )
    assert asked == ["Qwen/Qwen3-8B"]
    assert list(tmp_path.iterdir()) == []


def test_existing_output(run: Run, own_pair: Path, tmp_path: Path) -> None:
    output = tmp_path / "b"
    run.well("build", "--target", own_pair, "-o", output)
    inode = (output / "manifest.json").stat().st_ino
    run("build", "--target", own_pair, "-o", output).fails(2, str(output), "--overwrite")
    assert (output / "manifest.json").stat().st_ino == inode
    run.well("build", "--target", own_pair, "-o", output, "--overwrite")
    assert (output / "manifest.json").stat().st_ino != inode


def test_what_is_not_a_bundle_is_never_overwritten(
    run: Run, own_pair: Path, tmp_path: Path
) -> None:
    precious = tmp_path / "thesis"
    precious.mkdir()
    (precious / "chapter1.tex").write_text("…")
    run("build", "--target", own_pair, "-o", precious, "--overwrite").fails(2, "not a bundle")
    assert [path.name for path in precious.iterdir()] == ["chapter1.tex"]


def test_a_context_whose_tables_would_be_absurd(
    build: Callable[..., Outcome], own_pair: Path
) -> None:
    for part in ("target", "draft"):
        config = own_pair.parent / part / "config.json"
        fields = json.loads(config.read_text()) | {"max_position_embeddings": 2**30}
        config.write_text(json.dumps(fields))
    build("--max-seq-len", 2**24).fails(2, "RoPE tables", "--max-seq-len")

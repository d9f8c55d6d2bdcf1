"""`build`: what it writes where, and what it must find out before it writes or downloads.

Checkpoints, configurations and options that it refuses are in tests/frozen, as is what options
make of the manifest.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from tokenizers import Tokenizer

from tests.cli.conftest import Build, Run


def test_a_build(build: Build, own_pair: Path) -> None:
    outcome = build.well(own_pair)
    assert outcome.out == (
        f"{build.folder}: qwen3 target of 6 layers (103,840 parameters), "
        "DFlash draft of 2 (34,208), block 8, weights linked\n"
    )
    assert "linking weights" in outcome.err and "graphs" in outcome.err
    assert [path.name for path in build.folder.parent.iterdir()] == ["b"]


def test_the_default_output_is_here(
    run: Run, own_pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    run.well("build", "--target", own_pair)
    assert (tmp_path / "here" / "pair-bundle" / "manifest.json").is_file()


def test_a_hub_name_without_a_network(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def fail(name: str, **options: Any) -> None:
        asked.append(name)
        patterns = options["allow_patterns"]
        assert all("bin" not in pattern and "py" not in pattern for pattern in patterns)
        raise ConnectionError("Temporary failure in name resolution\n(try again)")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    build("qwen3-8b").fails(
        1, "Qwen/Qwen3-8B", "name resolution (try again)", "--target-checkpoint"
    )
    assert asked == ["Qwen/Qwen3-8B"]


def test_the_tokenizers_end_of_text_counts(build: Build, own_pair: Path, run: Run) -> None:
    """Tuned for chats: the configs name the base model's end, the tokenizer the turns' own."""
    folder = own_pair.parent / "target"
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    named = json.loads((folder / "config.json").read_text())["eos_token_id"]
    (folder / "tokenizer_config.json").write_text('{"eos_token": {"content": "b"}}')
    own = tokenizer.token_to_id("b")
    outcome = build.well(own_pair)
    assert f"eos_token {own} too" in outcome.err and f"(they name {named})" in outcome.err
    assert f"ends a text with {named}, {own}\n" in run.well("inspect", build.folder).out
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [own, named]}))
    assert "note" not in build.well(own_pair, "--overwrite").err
    assert f"ends a text with {own}, {named}\n" in run.well("inspect", build.folder).out
    told = run.well("generate", build.folder, "--prompt", "a", "--max-tokens", 9, "--json").json
    assert told["token_ids"][-1:] == [own]


def test_a_hostile_tokenizer_is_one_line(build: Build, own_pair: Path) -> None:
    file = own_pair.parent / "target" / "tokenizer.json"
    hostile = json.loads(file.read_text()) | {"pre_tokenizer": {"type": "FixedLength", "length": 0}}
    file.write_text(json.dumps(hostile))
    build(own_pair).fails(1, str(file), "makes the tokenizers library panic")

"""Build configurations: every mistake in a YAML file is one line with the key and a way out.

More files that are refused stand in tests/frozen/broken_files.py.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from dflash_trt import DflashError
from dflash_trt.building.named_pair import find_config
from dflash_trt.building.spec import Checkpoints
from dflash_trt.models.build_config import load_config, target_names
from tests.cli.bigram import write_bigram_pair
from tests.cli.conftest import Build, Run, refusal_of
from tests.frozen.broken_files import PAIR
from tests.models.helpers import edit_json


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        (PAIR + "max_sequence: 4\n", ["unknown key 'max_sequence'", "nearest: 'max_seq_len'"]),
        (
            PAIR + "shape: {target: {layrs: 3}}\n",
            ["errors: unknown key 'shape.target.layrs' (nearest: ", " more: ", "shape.draft, "],
        ),
        (
            PAIR.replace("checkpoint: t", "checkpont: t") + "max_batch: 0\nblock_size: 1\n",
            [
                "4 errors: ",
                "'target.checkpont'",
                "max_batch: ",
                "block_size: ",
                "draft.checkpoint: ",
            ],
        ),
        (
            "taget: t\ndraft: d\nprompts: p.jsonl\nmax_batch: 0\nexclude: [x]\n",
            ["5 errors: unknown key 'taget'", "max_batch: ", "exclude", "(nearest: 'target')"]
            + ["draft.checkpoint: there is no such", "prompts: there is no such file"],
        ),
        (PAIR + 'max_batch: "4"\n', ["max_batch", "integer", "got '4'"]),
        (PAIR + "max_batch: 4\nmax_batch: 8\n", ["'max_batch' is given twice"]),
        (PAIR + "precision: int4\n", ["precision", "'fp8'", "got 'int4'"]),
        (PAIR + 'profiles: {"/../../x": {gpu: b200}}\n', ["profiles", "got '/../../x'"]),
    ],
)
def test_mistakes(tmp_path: Path, text: str, pieces: list[str]) -> None:
    path = tmp_path / "pair.yaml"
    path.write_text(text)
    message = refusal_of(find_config, str(path), Checkpoints())
    for piece in [str(path), *pieces]:
        assert piece in message


@pytest.mark.parametrize("name", ["qwen3-8", "", "../demo", "demo.json", "a\nb", "x" * 10_000])
def test_unknown_names(name: str) -> None:
    message = refusal_of(find_config, name, Checkpoints())
    assert "no target is called" in message and "dflash-trt targets" in message
    if name == "qwen3-8":
        assert "(nearest: 'qwen3-8b')" in message


def test_every_shipped_config_is_valid() -> None:
    assert "demo" in target_names()
    for name in target_names():
        config, path = load_config(name)
        assert path.stem == name
        assert config.verified


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder `pair` with target/, draft/ and nothing else."""
    folder = write_bigram_pair(tmp_path / "pair").parent
    (folder / "pair.yaml").unlink()
    return folder


def test_two_folders_are_a_pair(build: Build, home: Path) -> None:
    words = ("--target-checkpoint", home / "target", "--draft-checkpoint", home / "draft")
    outcome = build.run("build", *words, "-o", build.folder)
    assert outcome.code == 0, outcome.err
    assert build.manifest["name"] == "pair"  # not "target", which says nothing


def test_a_draft_of_fewer_positions(run: Run, build: Build, home: Path) -> None:
    """The context is the target's; texts that outgrow the draft's go on without drafts."""
    whole = build.well(home)
    words = ("--prompt", "a" * 20, "--max-tokens", 60, "--json")
    expected = json.loads(run.well("generate", build.folder, *words).out)
    edit_json(home / "draft" / "config.json", max_position_embeddings=32)
    told = build.well(home, "--overwrite").err
    assert "note: drafts end at 32 positions: the draft was trained" in told
    assert "the target for 128" in told and "drafts end" not in whole.err
    found = json.loads(run.well("generate", build.folder, *words).out)
    assert found["token_ids"] == expected["token_ids"]
    assert 0 < found["drafted_tokens"] < expected["drafted_tokens"]
    assert "drafts end" not in build.well(home, "--max-seq-len", 32, "--overwrite").err
    edit_json(home / "draft" / "config.json", max_position_embeddings=8)
    build.well(home, "--overwrite")
    assert json.loads(run.well("generate", build.folder, *words).out)["drafted_tokens"] == 0


def test_a_folder_holds_or_names_both(home: Path, tmp_path: Path) -> None:
    both = Checkpoints(target_checkpoint=home / "target", draft_checkpoint=home / "draft")
    held = find_config(str(home), Checkpoints())
    assert held == find_config(None, both)
    draft = Checkpoints(draft_checkpoint=home / "draft")
    assert find_config(str(home / "target"), draft) == held
    other = tmp_path / "other"
    shutil.copytree(home / "draft", other)
    assert find_config(str(home), Checkpoints(draft_checkpoint=other))[0].draft.checkpoint == str(
        other
    )
    named = tmp_path / "named"
    named.mkdir()
    (named / "own.yml").write_text(f"target: {home}/target\ndraft: {home}/draft\nmax_batch: 3\n")
    config, path = find_config(str(named), Checkpoints())
    assert (config.max_batch, config.description, path.stem) == (3, "", "own")


def test_what_is_no_pair(home: Path, tmp_path: Path) -> None:
    known = tmp_path / "inner" / "models--Qwen--Qwen3-8B" / "snapshots" / "0a"
    shutil.copytree(home / "target", known)
    for target, given, pieces in (
        (None, Checkpoints(), ["no pair", "--target NAME, FILE.yaml or DIR", "--draft-checkpoint"]),
        (None, Checkpoints(draft_checkpoint=home), ["--target-checkpoint: is missing beside"]),
        (tmp_path, Checkpoints(), ["holds no pair", "no YAML file"]),
        (home / "target", Checkpoints(), ["a target without a draft", "train-draft"]),
        (known, Checkpoints(), ["--target qwen3-8b", str(known), "z-lab/Qwen3-8B-DFlash-b16"]),
        (None, Checkpoints(target_checkpoint=known), ["--draft-checkpoint: is missing", "z-lab/"]),
        (home / "draft", Checkpoints(), ["is a draft", "--target-checkpoint DIR"]),
        ("", Checkpoints(), ["no target is called"]),
    ):
        message = refusal_of(find_config, target if target is None else str(target), given)
        for piece in pieces:
            assert piece in message
    for name in ("a", "b"):
        (tmp_path / f"{name}.yaml").touch()
    assert "2 YAML files" in refusal_of(find_config, str(tmp_path), Checkpoints())


@pytest.mark.parametrize("words", [["--target-checkpoint", ""], ["--target", "demo", "-o", " "]])
def test_an_empty_path_is_not_this_folder(run: Run, home: Path, words: list[str]) -> None:
    run("build", *words).fails(2, "is empty")
    with pytest.raises(DflashError, match="is empty"):
        Checkpoints(target_checkpoint="")  # type: ignore[arg-type]

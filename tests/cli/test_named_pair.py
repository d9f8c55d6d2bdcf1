"""A pair of one's own in one line: folders that need no YAML file, and files that need little."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from dflash_trt import DflashError
from dflash_trt.building.named_pair import find_config
from dflash_trt.building.spec import Checkpoints
from tests.cli.bigram import write_bigram_pair
from tests.cli.conftest import Build, Run, refusal_of


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
    for target, given, pieces in (
        (None, Checkpoints(), ["no pair", "--target NAME, FILE.yaml or DIR", "--draft-checkpoint"]),
        (None, Checkpoints(draft_checkpoint=home), ["--target-checkpoint: is missing beside"]),
        (tmp_path, Checkpoints(), ["holds no pair", "no YAML file"]),
        (home / "target", Checkpoints(), ["a target without a draft", "train-draft"]),
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

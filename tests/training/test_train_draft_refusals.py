"""What `train-draft` refuses: a line each, before hours are spent, and nothing is left behind."""

from __future__ import annotations

import itertools
import json
import shutil
import sys
from pathlib import Path
from unittest import mock
from unittest.mock import Mock

import pytest

from tests.frozen.command_line import run
from tests.reference.checkpoints import Family, write_target
from tests.reference.mtp import write_mtp
from tests.training.prompts import TARGET, command, write_prompts, write_rows


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return write_prompts(tmp_path / "prompts.jsonl", 24)


def refused(tmp_path: Path, words: list[str], code: int, *pieces: str) -> None:
    before = sorted(tmp_path.rglob("*"))
    outcome = run(*words)
    outcome.fails(code, *pieces)
    assert sorted(tmp_path.rglob("*")) == before


def test_too_few_prompts(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl", 6)
    refused(tmp_path, command(prompts, tmp_path / "draft"), 2, "are too few; give at least 16")


def test_prompts_that_are_no_lines(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("hello")
    refused(tmp_path, command(file, tmp_path / "draft"), 2, "must be a .jsonl file")
    missing = tmp_path / "missing.jsonl"
    refused(tmp_path, command(missing, tmp_path / "draft"), 2, "no such file")


def test_a_given_answer_that_the_target_cannot_say(tmp_path: Path) -> None:
    rows = [{"prompt": f"shift #{i}", "answer": [5, 464 if i == 9 else 6]} for i in range(30)]
    prompts = write_rows(tmp_path / "prompts.jsonl", rows)
    words = command(prompts, tmp_path / "draft", "--given-answers")
    refused(tmp_path, words, 2, f"{prompts}:10: ", "token id 464 is outside the vocabulary of 464")


@pytest.mark.parametrize(
    ("more", "pieces"),
    [
        (["--set", "taps=3,1"], ["--set taps", "are not ascending layers from 0 to 31"]),
        (["--set", "taps=one"], ["--set", "is no list of layers"]),
        (
            ["--set", "mask-token-id=464"],
            ["--set mask-token-id", "464 is not a token from 0 to 463"],
        ),
        (["--set", "mask-token-id=0"], ["--set mask-token-id", "that ends no text"]),
        (["--block-size", "2000"], ["--block-size", "2000 is no block size from 2 to"]),
        (["--set", "tap=1"], ["--set: 'tap=1' is not NAME=VALUE (nearest: 'taps')", "anchors, "]),
        (["--set", "gamma=0"], ["'--set': 0.0 is not in the range"]),
        (["--prompts", "a=b=c.jsonl"], ["no such file"]),
        (["--hours", "0"], ["--hours", "0 is no time"]),
        (["--system-prompt", "be brief"], ["--system-prompt", "needs a chat template"]),
        (["--template-option", "a=b"], ["--template-option", "needs a chat template"]),
        (["--template-option", "ab"], ["--template-option", "is not one NAME=VALUE"]),
        (["--answers-from", "ftp://a"], ["--answers-from", "is no http:// or https:// address"]),
        (["--answers-from", "http://127.0.0.1:9"], ["does not answer /models"]),
        (
            ["--kind", "eagle3", "--set", "markov-rank=8"],
            ["--set markov-rank: is not for a draft of kind eagle3"],
        ),
        (
            ["--kind", "dspark", "--set", "draft-tokens=9"],
            ["--set draft-tokens: is not for a draft of kind dspark"],
        ),
        (
            ["--kind", "dflash2", "--set", "markov-rank=9"],
            ["--set markov-rank: is not for a draft of kind dflash2"],
        ),
        (
            ["--kind", "dspark", "--set", "selector-top-k=9"],
            ["--set selector-top-k: is not for a draft of kind dspark"],
        ),
        (["--kind", "dflash2", "--set", "selector-top-k=1025"], ["--set", "1<=x<=1024"]),
        (
            ["--kind", "eagle3", "--set", "layers=2"],
            ["--set layers", "is not for a draft of kind eagle3"],
        ),
        (["--kind", "eagle3", "--block-size", "9"], ["--block-size", "from 2 to 8"]),
        (["--kind", "mtp"], ["--kind mtp: targets of the family qwen3 have no MTP layer"]),
        (["--given-answers"], ["--given-answers", 'no prompt has an "answer"']),
        (["--from", "nowhere"], ["nowhere", "no such folder"]),
    ],
)
def test_options_that_do_not_go(
    tmp_path: Path, prompts: Path, more: list[str], pieces: list[str]
) -> None:
    code = 1 if more[-1] in ("http://127.0.0.1:9", "nowhere") else 2
    refused(tmp_path, command(prompts, tmp_path / "draft", *more), code, *pieces)


@pytest.mark.parametrize(
    ("family", "more", "pieces"),
    [
        ("qwen3_5", ["--block-size", "4"], ["--block-size: is not for a draft of kind mtp"]),
        ("qwen3_5", ["--set", "draft-tokens=9"], ["--set draft-tokens: is not for a draft of"]),
        (
            "qwen3_5_moe",
            [],
            ["has a mixture of experts, which training of MTP", "such as --kind dflash"],
        ),
    ],
)
def test_what_an_mtp_layer_leaves_no_room_for(
    tmp_path: Path, prompts: Path, family: Family, more: list[str], pieces: list[str]
) -> None:
    own = write_mtp(write_target(tmp_path / "own", family, num_layers=4, vocab=464))
    shutil.copy(TARGET / "tokenizer.json", own)
    words = command(prompts, tmp_path / "draft", "--target", own, "--kind", "mtp", *more)
    refused(tmp_path, words, 2 if more else 1, *pieces)


def test_a_target_that_cannot_be_trained_for(tmp_path: Path, prompts: Path) -> None:
    words = command(prompts, tmp_path / "draft")
    words[2] = "demoo"
    refused(tmp_path, words, 2, "--target", "neither a folder nor a known target", "'demo'")
    target = tmp_path / "target"
    shutil.copytree(TARGET, target)
    words[2] = str(target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"architectures": ["Mamba"]}))
    refused(tmp_path, words, 1, "architecture", "Mamba", "is not supported as a target")
    (target / "config.json").write_text(json.dumps(config))
    (target / "tokenizer.json").unlink()
    refused(tmp_path, words, 1, "has no tokenizer.json")


def test_a_tokenizer_without_a_token_to_spare(tmp_path: Path, prompts: Path) -> None:
    target = tmp_path / "target"
    shutil.copytree(TARGET, target)
    file = target / "tokenizer.json"
    file.write_text(file.read_text().replace("<|mask|>", "<|other|>"))
    described = target / "tokenizer_config.json"
    described.write_text(described.read_text().replace("<|mask|>", "<|other|>"))
    tokenizer = json.loads(file.read_text())
    for token in tokenizer["added_tokens"]:
        token["special"] = token["content"] != "<|other|>"
    file.write_text(json.dumps(tokenizer))
    words = command(prompts, tmp_path / "draft")
    words[2] = str(target)
    refused(tmp_path, words, 2, "--set mask-token-id", "no reserved or unused token")


@pytest.mark.parametrize(("told", "seconds"), [("0.2 h", 50.0), ("5 h", 500.0)])
def test_too_few_hours_are_told_before_the_answers_end(
    tmp_path: Path, prompts: Path, told: str, seconds: float
) -> None:
    """On a machine whose clock moves so much between two looks."""
    clock = itertools.count(0.0, seconds)
    with mock.patch("dflash_trt.training.answers.time", Mock(perf_counter=lambda: next(clock))):
        words = command(prompts, tmp_path / "draft", "--hours", told.split()[0], steps=None)
        run(*words).fails(1, f"--hours: {told} are too few on this machine: 8 prompts and 20 steps")
    assert next(clock) <= 10 * seconds


def test_a_disk_that_is_too_small(tmp_path: Path, prompts: Path) -> None:
    usage = shutil._ntuple_diskusage(1 << 20, 1 << 20, 4096)  # type: ignore[attr-defined]
    with mock.patch("dflash_trt.training.features.shutil.disk_usage", return_value=usage):
        words = command(prompts, tmp_path / "draft")
        refused(tmp_path, words, 1, "features of", "tokens take", "4,096 are free", "online=true")


@pytest.mark.parametrize(
    ("work", "pieces"),
    [
        ("draft", ["--output", "the folder of --set work"]),
        (".", ["--output", "lies in, the folder of --set work"]),
        ("draft-bundle/work", ["--set work", "lies in, the folder of the bundle"]),
    ],
)
def test_folders_that_would_be_written_over(
    tmp_path: Path, prompts: Path, work: str, pieces: list[str]
) -> None:
    words = command(prompts, tmp_path / "draft", "--set", f"work={tmp_path / work}")
    refused(tmp_path, words, 2, *pieces, "keep the three apart")


def test_a_draft_that_is_there_stays(tmp_path: Path, prompts: Path) -> None:
    draft = tmp_path / "draft"
    draft.mkdir()
    refused(tmp_path, command(prompts, draft), 2, "already exists")
    words = command(prompts, draft, "--overwrite")
    refused(tmp_path, words, 2, "is not a draft that was trained here; it is not overwritten")


def test_without_pytorch_one_line_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    options = ("--target", "x", "--prompts", "y.jsonl", "--hours", "1", "-o", tmp_path / "draft")
    run("train-draft", *options).fails(1, "training needs torch", "pip install -e '.[train]'")

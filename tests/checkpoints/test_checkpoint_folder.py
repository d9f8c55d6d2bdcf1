"""Folders: single, sharded, hub snapshots; every disagreement named."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_trt.checkpoints.folder import open_checkpoint
from dflash_trt.checkpoints.target import read_target
from dflash_trt.core.strict_json import read_json

MakeCheckpoint = Callable[..., Path]
Refused = Callable[..., Any]
INDEX = "model.safetensors.index.json"


def edit_index(folder: Path, **weight_map: Any) -> None:
    path = folder / INDEX
    index = json.loads(path.read_text())
    for name, shard in weight_map.items():
        if shard is ...:
            del index["weight_map"][name]
        else:
            index["weight_map"][name] = shard
    path.write_text(json.dumps(index))


def test_single_file(make_target: MakeCheckpoint) -> None:
    folder = make_target()
    checkpoint = open_checkpoint(folder)
    assert checkpoint.files == (folder / "model.safetensors",)
    assert checkpoint.config["hidden_size"] == 16
    assert checkpoint.tensors["lm_head.weight"].shape == (40, 16)


def test_shards_hold_what_one_file_holds(make_target: MakeCheckpoint) -> None:
    whole = open_checkpoint(make_target()).tensors
    folder = make_target(shards=3)
    (folder / "model.safetensors").unlink()
    checkpoint = open_checkpoint(folder)
    assert [file.name for file in checkpoint.files] == [
        f"model-0000{k}-of-00003.safetensors" for k in (1, 2, 3)
    ]
    assert {n: (e.dtype, e.shape) for n, e in checkpoint.tensors.items()} == {
        n: (e.dtype, e.shape) for n, e in whole.items()
    }


def test_hub_snapshot_of_symlinks(make_target: MakeCheckpoint, tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for k, file in enumerate(sorted(make_target(shards=2).iterdir())):
        file.rename(blobs / f"hash{k}")
        (snapshot / file.name).symlink_to(Path("../../blobs") / f"hash{k}")
    target = read_target(snapshot)
    assert {e.file.parent for e in target.weights.values()} == {blobs.resolve()}
    assert {f.resolve() for f in target.checkpoint.files} == {
        e.file for e in target.weights.values()
    }


@pytest.mark.parametrize(
    "shard",
    [
        "../model-00001-of-00002.safetensors",
        "/etc/model.safetensors",
        "sub/model.safetensors",
        "..\\model.safetensors",
        "C:model.safetensors",
        "nul\0.safetensors",
        "..",
        "",
        "weights.bin",
        7,
        None,
    ],
)
def test_shard_paths_that_leave_the_folder(
    make_target: MakeCheckpoint, refused: Refused, shard: Any
) -> None:
    folder = make_target(shards=2)
    edit_index(folder, **{"lm_head.weight": shard})
    with refused(INDEX, json.dumps(shard), "is not the name of a .safetensors file in this folder"):
        open_checkpoint(folder)


def test_missing_shard(make_target: MakeCheckpoint, refused: Refused) -> None:
    folder = make_target(shards=2)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with refused(INDEX, '"model-00002-of-00002.safetensors"', "not in the folder"):
        open_checkpoint(folder)


def test_overlong_shard_name(make_target: MakeCheckpoint, refused: Refused) -> None:
    folder = make_target(shards=2)
    edit_index(folder, **{"lm_head.weight": "a" * 5000 + ".safetensors"})
    with refused("not in the folder"):
        open_checkpoint(folder)


def test_index_and_shards_disagree(make_target: MakeCheckpoint, refused: Refused) -> None:
    folder = make_target(shards=2)
    first = "model-00001-of-00002.safetensors"
    edit_index(folder, **{"ghost": first, "lm_head.weight": ...})
    with refused('"ghost" is not in ' + first, '"lm_head.weight" in', "is not in the index"):
        open_checkpoint(folder)
    edit_index(folder, **{f"ghost{k}": first for k in range(9)})
    with refused("and 8 more"):
        open_checkpoint(folder)


def test_tensor_listed_in_the_wrong_shard(make_target: MakeCheckpoint, refused: Refused) -> None:
    folder = make_target(shards=2)
    shard = json.loads((folder / INDEX).read_text())["weight_map"]["lm_head.weight"]
    other = shard.replace("00001-of", "0000X-of").replace("00002-of", "00001-of")
    other = other.replace("0000X-of", "00002-of")
    edit_index(folder, **{"lm_head.weight": other})
    with refused(f'"lm_head.weight" is not in {other}'):
        open_checkpoint(folder)


def test_tensor_in_two_shards(make_target: MakeCheckpoint, refused: Refused) -> None:
    folder = make_target(shards=2)
    copy = folder / "model-00003-of-00003.safetensors"
    copy.write_bytes((folder / "model-00001-of-00002.safetensors").read_bytes())
    edit_index(folder, ghost=copy.name)
    with refused("is in both model-00001-of-00002.safetensors and", copy.name):
        open_checkpoint(folder)


def test_truncated_shard(make_target: MakeCheckpoint, refused: Refused) -> None:
    folder = make_target(shards=2)
    shard = folder / "model-00002-of-00002.safetensors"
    os.truncate(shard, shard.stat().st_size - 100)
    with refused(shard.name, "truncated: 100 of", "download the file again"):
        open_checkpoint(folder)


@pytest.mark.parametrize("index", ["[]", "{}", '{"weight_map": []}', '{"weight_map": {}}'])
def test_malformed_index(make_target: MakeCheckpoint, refused: Refused, index: str) -> None:
    folder = make_target(shards=2)
    (folder / INDEX).write_text(index)
    with refused(INDEX):
        open_checkpoint(folder)


def test_folders_without_weights(make_target: MakeCheckpoint, refused: Refused) -> None:
    folder = make_target()
    (folder / "model.safetensors").unlink()
    with refused("has neither model.safetensors nor model.safetensors.index.json"):
        open_checkpoint(folder)
    (folder / "pytorch_model.bin").touch()
    with refused("holds only pickle weights (pytorch_model.bin)", "convert"):
        open_checkpoint(folder)
    (folder / "pytorch_model.bin").rename(folder / "m.gguf")
    with refused("holds only GGUF weights (m.gguf)"):
        open_checkpoint(folder)


def test_no_tensors(make_target: MakeCheckpoint, refused: Refused) -> None:
    folder = make_target()
    (folder / "model.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")
    with refused("holds no tensors"):
        open_checkpoint(folder)


def test_no_folder(make_target: MakeCheckpoint, tmp_path: Path, refused: Refused) -> None:
    with refused("no such folder"):
        open_checkpoint(tmp_path / "absent")
    with refused("is a file, not a folder"):
        open_checkpoint(make_target() / "config.json")
    with refused("has no config.json"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("text", "piece"),
    [
        ("", "not valid JSON"),
        ("{'a': 1}", "not valid JSON"),
        ("[1]", "must hold a JSON object, not list"),
        ('{"block_size": NaN}', '"block_size" is NaN'),
        ('{"a": {"b": [1, -Infinity]}}', '"b" is infinite'),
        ('{"a": 1e999}', '"a" is infinite'),
        ('{"a": 1, "a": 1}', '"a" is given twice'),
        ('{"a": ' + "9" * 5000 + "}", "not valid JSON"),
        ("[" * 100_000, "nested too deeply"),
        ("\udcff", "not UTF-8"),
    ],
)
def test_malformed_config(
    make_target: MakeCheckpoint, refused: Refused, text: str, piece: str
) -> None:
    folder = make_target()
    (folder / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with refused("config.json", piece):
        open_checkpoint(folder)


def test_oversized_json(tmp_path: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.json"
    path.write_text("[1, NaN]")
    with refused("the top level is NaN"):
        read_json(path)
    monkeypatch.setattr("dflash_trt.core.strict_json.MAX_JSON_BYTES", 4)
    with refused("larger than 4 bytes"):
        read_json(path)


def test_fifo_is_not_opened(make_target: MakeCheckpoint, refused: Refused) -> None:
    folder = make_target()
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")
    with refused("has no config.json"):
        open_checkpoint(folder)

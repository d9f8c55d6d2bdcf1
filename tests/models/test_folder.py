"""Folders, shards and headers: golden offsets, and every lie refused by name."""

from __future__ import annotations

import hashlib
import json
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_trt.models.folder import open_checkpoint
from dflash_trt.models.safetensors_header import header_sha256, read_header
from dflash_trt.models.target import read_target
from tests.models.conftest import MakeCheckpoint, merged
from tests.models.helpers import edit_json, refused

INDEX = "model.safetensors.index.json"
FIRST, SECOND = (f"model-0000{k}-of-00002.safetensors" for k in (1, 2))
COPY = "model-00003-of-00003.safetensors"


@pytest.fixture
def sharded(make_target: MakeCheckpoint) -> Path:
    """A target of two shards."""
    return make_target(shards=2)


def edit_index(folder: Path, **changes: Any) -> None:
    """Moves tensors to other shards in the index; ... drops one."""
    places = json.loads((folder / INDEX).read_text())["weight_map"]
    edit_json(folder / INDEX, weight_map=merged(places, changes))


def test_shards_hold_what_one_file_holds(make_target: MakeCheckpoint) -> None:
    folder = make_target()
    whole = open_checkpoint(folder)
    assert whole.files == (folder / "model.safetensors",)
    assert whole.config["hidden_size"] == 16
    assert whole.tensors["lm_head.weight"].shape == (40, 16)
    whole.files[0].unlink()
    parts = open_checkpoint(make_target(shards=3))
    names = [f"model-0000{k}-of-00003.safetensors" for k in (1, 2, 3)]
    assert [file.name for file in parts.files] == names
    assert {n: (e.dtype, e.shape) for n, e in parts.tensors.items()} == {
        n: (e.dtype, e.shape) for n, e in whole.tensors.items()
    }


def test_hub_snapshot_of_symlinks(sharded: Path, tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for k, file in enumerate(sorted(sharded.iterdir())):
        file.rename(blobs / f"hash{k}")
        (snapshot / file.name).symlink_to(Path("../../blobs") / f"hash{k}")
    target = read_target(snapshot)
    files = {entry.file for entry in target.weights.values()}
    assert {file.parent for file in files} == {blobs.resolve()}
    assert {file.resolve() for file in target.checkpoint.files} == files


@pytest.mark.parametrize(
    "shard",
    [
        "../model-00001-of-00002.safetensors",
        "/etc/model.safetensors",
        "..\\model.safetensors",
        "nul\0.safetensors",
        7,
    ],
)
def test_shard_paths_that_leave_the_folder(sharded: Path, shard: Any) -> None:
    edit_index(sharded, **{"lm_head.weight": shard})
    with refused(INDEX, json.dumps(shard), "is not the name of a .safetensors file in this folder"):
        open_checkpoint(sharded)


def test_missing_shards(sharded: Path) -> None:
    (sharded / SECOND).unlink()
    with refused(INDEX, f'"{SECOND}"', "not in the folder"):
        open_checkpoint(sharded)
    edit_index(sharded, **{"lm_head.weight": "a" * 5000 + ".safetensors"})
    with refused("not in the folder"):
        open_checkpoint(sharded)


@pytest.mark.parametrize(
    ("changes", "pieces"),
    [
        (
            {"ghost": FIRST, "lm_head.weight": ...},
            (f'"ghost" is not in {FIRST}', '"lm_head.weight" in', "is not in the index"),
        ),
        ({f"ghost{k}": FIRST for k in range(11)}, ("and 8 more",)),
        ({"lm_head.weight": SECOND}, (f'"lm_head.weight" is not in {SECOND}',)),
        ({"ghost": COPY}, (f"is in both {FIRST} and {COPY}",)),
    ],
)
def test_index_and_shards_disagree(
    sharded: Path, changes: dict[str, Any], pieces: tuple[str, ...]
) -> None:
    (sharded / COPY).write_bytes((sharded / FIRST).read_bytes())
    edit_index(sharded, **changes)
    with refused(*pieces):
        open_checkpoint(sharded)


def test_a_folder_of_gguf(make_target: MakeCheckpoint) -> None:
    file = make_target() / "model.safetensors"
    file.rename(file.with_name("m.gguf"))
    with refused(
        "holds only GGUF weights (m.gguf); make a checkpoint of it: dflash-trt import-gguf"
    ):
        open_checkpoint(file.parent)
    with refused("is a file, not a folder; make a checkpoint of it: dflash-trt import-gguf"):
        open_checkpoint(file.with_name("m.gguf"))


Hostile = Callable[..., Path]


def tensor(dtype: Any = "F32", shape: Any = (2,), begin: Any = 0, end: Any = 8) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def test_golden_header(hostile: Hostile) -> None:
    header = {"__metadata__": {"format": "pt"}, "a": tensor()}
    path = hostile(header, b"\0" * 8)
    entry = read_header(path)["a"]
    raw = json.dumps(header).encode()
    assert (entry.offset, entry.length, entry.file) == (8 + len(raw), 8, path.resolve())
    assert header_sha256(path) == hashlib.sha256(struct.pack("<Q", len(raw)) + raw).hexdigest()


@pytest.mark.parametrize(
    ("header", "data", "piece"),
    [
        (b"{", b"", "not valid JSON"),
        (b'{"a": 1, "a": 2}', b"", 'key "a" is given twice'),
        ({"a": {"dtype": "F32", "shape": []}}, b"", 'tensor "a": must have exactly'),
        ({"a": tensor(dtype=["F32"])}, b"\0" * 8, "is not supported"),
        ({"a": tensor(shape=[True, 2])}, b"\0" * 8, "shape has true"),
        ({"a": tensor(shape=[2**63])}, b"\0" * 8, "shape has 9223372036854775808"),
        ({"a": tensor(shape=[1] * 33, end=4)}, b"\0" * 4, "at most 32 sizes"),
        ({"a": tensor(shape=[3])}, b"\0" * 8, "needs 12 bytes, data_offsets give 8"),
        ({"a": {**tensor(), "data_offsets": [0]}}, b"\0" * 8, "begin <= end"),
        ({"a": tensor(), "b": tensor(begin=4, end=12)}, b"\0" * 12, 'overlaps tensor "a" by 4'),
        ({"a": tensor(), "b": tensor(begin=12, end=20)}, b"\0" * 20, '"b": leaves a hole of 4'),
        ({"a": tensor()}, b"\0" * 5, "truncated: 3 of"),
        ({"a": tensor()}, b"\0" * 9, "1 bytes after its last tensor"),
        ({"__metadata__": {"a": 1}}, b"", "__metadata__ must map text to text"),
        ({"bad\nname\ud800": 1}, b"", r"bad\nname\ud800"),
    ],
)
def test_lies_are_refused(hostile: Hostile, header: Any, data: bytes, piece: str) -> None:
    with refused("hostile.safetensors", piece):
        read_header(hostile(header, data))


def test_lying_lengths_allocate_nothing(hostile: Hostile) -> None:
    tracemalloc.start()
    with refused("claims 18446744073709551615 bytes, over the limit of 100000000"):
        read_header(hostile(b"{}", length=2**64 - 1))
    with refused("claims 99999999 bytes but only 2 follow"):
        read_header(hostile(b"{}", length=99_999_999))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1_000_000

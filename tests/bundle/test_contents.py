"""What a bundle holds: every field of its manifest, and weights that are linked, not copied."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from importlib.metadata import version
from pathlib import Path

import numpy as np
import onnx
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from dflash_trt.backends.base import Scores, TargetCall
from dflash_trt.backends.registry import open_executor
from dflash_trt.bundle.bundle import open_bundle, verify_bundle
from dflash_trt.errors import DflashError
from tests.bundle.conftest import Watcher, build_pair, read_manifest_json

TARGET_WEIGHTS = "weights/target/shard-00000.safetensors"
DRAFT_WEIGHTS = "weights/draft/shard-00000.safetensors"
# Hidden 16, 4/2 heads × 8, ffn 24, as in tests/models/conftest.py.
LAYER = 2 * 16 * 32 + 2 * 16 * 16 + 3 * 16 * 24 + 2 * 16 + 2 * 8
TARGET_PARAMETERS = 6 * LAYER + 2 * 40 * 16 + 16
DRAFT_PARAMETERS = 2 * LAYER + 16 * 48 + 2 * 16


def _runs(folder: Path) -> bool:
    """Whether ONNX Runtime opens all three graphs and gives finite logits."""
    executor = open_executor(open_bundle(folder), threads=1, graphs=("target_only", "draft"))
    ids, starts = np.array([[5, 6]]), np.array([0])
    output = executor.forward(TargetCall("target", 0, ids, starts, np.array([[1]]), Scores.LOGITS))
    assert output.logits is not None
    finite = bool(np.isfinite(output.logits).all())
    executor.close()
    return finite


def _is_linked(source: Path, placed: Path) -> bool:
    one, other = source.stat(), placed.stat()
    return (one.st_dev, one.st_ino) == (other.st_dev, other.st_ino)


def test_manifest(pair: Path, tmp_path: Path) -> None:
    """Counts by hand, and every file of the bundle; all other fields are frozen."""
    build_pair(pair, tmp_path / "b")
    manifest = read_manifest_json(tmp_path / "b")
    libraries = ("numpy", "onnx", "onnxruntime", "safetensors", "tokenizers")
    assert manifest["libraries"] == {name: version(name) for name in libraries}
    for owner, parameters in (("target", TARGET_PARAMETERS), ("draft", DRAFT_PARAMETERS)):
        assert manifest[owner]["parameters"] == parameters
        assert manifest[owner]["weight_bytes"] == 4 * parameters
    for file in manifest["files"]:
        data = (tmp_path / "b" / file["path"]).read_bytes()
        assert file["bytes"] == len(data)
        if file["path"] in (TARGET_WEIGHTS, DRAFT_WEIGHTS):
            header = data[: 8 + int.from_bytes(data[:8], "little")]
            assert file["header_sha256"] == hashlib.sha256(header).hexdigest()
            assert file["sha256"] is None
        else:
            assert file["sha256"] == hashlib.sha256(data).hexdigest()
    paths = [file["path"] for file in manifest["files"]]
    actual = {p.relative_to(tmp_path / "b").as_posix() for p in (tmp_path / "b").rglob("*")}
    assert paths == sorted(paths)
    assert actual == {*paths, "weights", "weights/target", "weights/draft", "manifest.json"}


def test_a_bundle_of_coupled_drafts_is_refused(pair: Path, tmp_path: Path) -> None:
    """Older versions could build it; its draft graph has an output that is not read any more."""
    folder = tmp_path / "b"
    build_pair(pair, folder)
    manifest = read_manifest_json(folder)
    manifest["draft"]["sharpness"] = [1.0] * (manifest["limits"]["block_size"] - 1)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(DflashError, match="not made any more; build the bundle"):
        open_bundle(folder)


def test_weights_are_linked(pair: Path, tmp_path: Path) -> None:
    watcher = Watcher()
    build_pair(pair, tmp_path / "b", watcher=watcher)
    assert _is_linked(pair / "target" / "model.safetensors", tmp_path / "b" / TARGET_WEIGHTS)
    assert _is_linked(pair / "draft" / "model.safetensors", tmp_path / "b" / DRAFT_WEIGHTS)
    assert watcher.stages == [("linking weights", None), ("graphs", None)]
    # The graphs hold no weights: what is not linked is small.
    own = [p for p in (tmp_path / "b").rglob("*") if p.is_file() and p.stat().st_nlink == 1]
    assert {p.suffix for p in own} == {".onnx", ".json", ".safetensors"}
    for path in own:
        if path.suffix == ".onnx":
            model = onnx.load(path, load_external_data=False)
            inside = [t for t in model.graph.initializer if not t.external_data]
            assert sum(len(t.SerializeToString()) for t in inside) < 4096
    assert _runs(tmp_path / "b")


def test_copy_weights(pair: Path, tmp_path: Path) -> None:
    build_pair(pair, tmp_path / "b", copy_weights=True)
    source, placed = pair / "target" / "model.safetensors", tmp_path / "b" / TARGET_WEIGHTS
    assert not _is_linked(source, placed)
    assert placed.read_bytes() == source.read_bytes()
    assert read_manifest_json(tmp_path / "b")["weights"] == "copied"
    # onnx's own tools open it, which they refuse with hard links.
    onnx.load(tmp_path / "b" / "target.onnx", load_external_data=True)
    assert _runs(tmp_path / "b")


def test_hash_weights(pair: Path, tmp_path: Path) -> None:
    watcher = Watcher()
    build_pair(pair, tmp_path / "b", hash_weights=True, watcher=watcher)
    files = {file["path"]: file for file in read_manifest_json(tmp_path / "b")["files"]}
    data = (pair / "target" / "model.safetensors").read_bytes()
    assert files[TARGET_WEIGHTS]["sha256"] == hashlib.sha256(data).hexdigest()
    name, total = watcher.stages[-1]
    assert name == "hashing weights"
    assert total == watcher.done[name] == sum(file["bytes"] for file in files.values())


def test_a_hub_snapshot(pair: Path, tmp_path: Path) -> None:
    """A hub cache: snapshots/REVISION/… are symlinks into blobs/, named by hash."""
    blobs, snapshot = tmp_path / "hub" / "blobs", tmp_path / "hub" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    for part in ("target", "draft"):
        (snapshot / part).mkdir(parents=True)
        for file in (pair / part).iterdir():
            blob = blobs / hashlib.sha256(file.read_bytes()).hexdigest()
            shutil.move(file, blob)
            (snapshot / part / file.name).symlink_to(os.path.relpath(blob, snapshot / part))
    build_pair(snapshot, tmp_path / "b")
    placed = tmp_path / "b" / TARGET_WEIGHTS
    assert not placed.is_symlink()
    assert _is_linked(snapshot / "target" / "model.safetensors", placed)
    # A blob's name is its hash: known without reading it, checked when asked for.
    bundle = open_bundle(tmp_path / "b")
    hashes = {file.path: file.sha256 for file in bundle.manifest.files}
    assert hashes[TARGET_WEIGHTS] == hashlib.sha256(placed.read_bytes()).hexdigest()
    assert f"{TARGET_WEIGHTS}: sha256 matches" in verify_bundle(bundle, lambda count: None)
    # The bundle outlives the cache.
    shutil.rmtree(tmp_path / "hub")
    assert _runs(tmp_path / "b")


def test_no_room_is_known_before_the_first_byte(
    pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = [(pair / n / "model.safetensors").stat().st_size for n in ("target", "draft")]

    class Usage:
        free = max(sizes)  # each file fits, both do not

    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage)
    watcher = Watcher()
    with pytest.raises(DflashError) as caught:
        build_pair(pair, tmp_path / "b", copy_weights=True, watcher=watcher)
    message = str(caught.value)
    assert f"needs {sum(sizes):,} bytes, {max(sizes):,} are free" in message
    assert message.startswith(f"{tmp_path / 'b'}: ") and ".building-" not in message
    assert "copying weights" not in watcher.done
    assert [path.name for path in tmp_path.iterdir()] == ["pair"]


def test_tokenizer_files_are_copied(pair: Path, tmp_path: Path) -> None:
    wanted = {
        "tokenizer.json": Tokenizer(WordLevel({"a": 0}, unk_token="a")).to_str(),
        "tokenizer_config.json": json.dumps({"chat_template": "x"}),
        "special_tokens_map.json": "{}",
        "added_tokens.json": "{}",
        "generation_config.json": "{}",
        "chat_template.jinja": "y",
    }
    for name, text in {**wanted, "modeling_evil.py": "x", "training_args.bin": "x"}.items():
        (pair / "target" / name).write_text(text)
    build_pair(pair, tmp_path / "b")
    copied = {path.name: path.read_text() for path in (tmp_path / "b" / "tokenizer").iterdir()}
    assert copied == wanted
    assert read_manifest_json(tmp_path / "b")["tokenizer"] is True

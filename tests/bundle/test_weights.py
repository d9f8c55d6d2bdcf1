"""weights/target and weights/draft are checkpoints that a bundle can be built from."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from dflash_trt.bundle.bundle import open_bundle
from dflash_trt.bundle.graph_folder import GraphFolder
from dflash_trt.errors import DflashError
from dflash_trt.models.draft import read_draft
from dflash_trt.models.pair_check import Pair, check_pair
from dflash_trt.models.safetensors_header import TensorEntry
from dflash_trt.models.target import read_target
from dflash_trt.proof.twins import read_pair
from tests.bundle.conftest import Watcher, build_pair, write_pair


def contents(weights: dict[str, TensorEntry]) -> dict[str, bytes]:
    return {
        role: entry.file.read_bytes()[entry.offset : entry.offset + entry.length]
        for role, entry in weights.items()
    }


def assert_same(actual: Pair, expected: Pair) -> None:
    for one, other in ((actual.target, expected.target), (actual.draft, expected.draft)):
        for field in fields(one):
            if field.name not in ("weights", "checkpoint"):
                assert getattr(one, field.name) == getattr(other, field.name), field.name
        assert contents(one.weights) == contents(other.weights)


@pytest.mark.parametrize("copy", [False, True])
@pytest.mark.parametrize("shards", [1, 3])
def test_a_bundle_reads_back_as_the_pair_it_was_built_from(
    tmp_path: Path, shards: int, copy: bool
) -> None:
    folder = write_pair(tmp_path / "pair", shards=shards, dtype="BF16")
    (folder / "target" / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    stated = '{"quantization": {"quant_algo": null, "kv_cache_quant_algo": "FP8"}}'
    (folder / "draft" / "hf_quant_config.json").write_text(stated)
    build_pair(folder, tmp_path / "b", copy_weights=copy)
    built = check_pair(read_target(folder / "target"), read_draft(folder / "draft"))
    again = read_pair(open_bundle(tmp_path / "b"))
    assert_same(again, built)
    assert again.target.eos_token_ids == (5, 6)
    placed = tmp_path / "b" / "weights"
    assert (placed / "draft" / "hf_quant_config.json").read_text() == stated
    assert not (placed / "target" / "hf_quant_config.json").exists()
    index = json.loads((placed / "target" / "model.safetensors.index.json").read_text())
    total = sum(entry.length for entry in built.target.checkpoint.tensors.values())
    assert index["metadata"] == {"total_size": total}
    assert set(index["weight_map"]) == set(built.target.checkpoint.tensors)

    build_pair(placed, tmp_path / "again")  # from the bundle's own checkpoints
    for graph in ("target", "draft", "target_only"):
        name = f"{graph}.onnx"
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_a_shard_that_nothing_reads_is_left_out(tmp_path: Path) -> None:
    """Buffers that old exporters saved, in a shard of their own."""
    folder = write_pair(tmp_path / "pair", shards=2)
    target = folder / "target"
    index = json.loads((target / "model.safetensors.index.json").read_text())
    norm = load_file(target / index["weight_map"]["model.norm.weight"])["model.norm.weight"]
    save_file({"model.rotary_emb.inv_freq": norm}, target / "model-buffers.safetensors")
    index["weight_map"]["model.rotary_emb.inv_freq"] = "model-buffers.safetensors"
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
    build_pair(folder, tmp_path / "b")
    assert len(list((tmp_path / "b" / "weights" / "target").glob("*.safetensors"))) == 2
    assert "inv_freq" not in str(read_pair(open_bundle(tmp_path / "b")).target.checkpoint.tensors)


def test_a_shard_of_both_models_lies_in_both_folders(pair: Path, tmp_path: Path) -> None:
    target = read_target(pair / "target")
    norm = target.weights["norm"]
    graphs = GraphFolder(tmp_path / "b")
    graphs.place_weights(
        {"target": target.weights, "draft": {"norm": norm}}, tmp_path / "b", Watcher()
    )
    for owner in ("target", "draft"):
        assert graphs.shards(owner) == {norm.file: "shard-00000.safetensors"}
        assert norm.file.samefile(tmp_path / "b" / "weights" / owner / "shard-00000.safetensors")
    assert graphs.locate(norm) == "weights/target/shard-00000.safetensors"
    assert not graphs.has_copies


def test_bundles_of_earlier_versions_say_so(pair: Path, tmp_path: Path) -> None:
    build_pair(pair, tmp_path / "b")
    manifest = json.loads((tmp_path / "b" / "manifest.json").read_text())
    manifest["files"] = [one for one in manifest["files"] if "config" not in one["path"]]
    (tmp_path / "b" / "manifest.json").write_text(json.dumps(manifest))
    (tmp_path / "b" / "weights" / "draft" / "config.json").unlink()
    with pytest.raises(DflashError, match="earlier version built it; build it again"):
        read_pair(open_bundle(tmp_path / "b"))

"""`inspect`: figures worked out by hand, and damage that is found."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.reference.dflash2 import write_dflash2

# 6 target layers and 2 draft layers of 2 KV heads × 8, K and V, float32.
TARGET_TOKEN_BYTES = 6 * 2 * 2 * 8 * 4
DRAFT_TOKEN_BYTES = 2 * 2 * 2 * 8 * 4
# Per layer: q and o 64×32, k and v 64×16, three of 64×24, norms 2×64 + 2×8.
LAYER = 2 * 64 * 32 + 2 * 64 * 16 + 3 * 64 * 24 + 2 * 64 + 2 * 8
TARGET_PARAMETERS = 6 * LAYER + 2 * 300 * 64 + 64
DRAFT_PARAMETERS = 2 * LAYER + 64 * 3 * 64 + 2 * 64
WEIGHTS = "weights/draft/shard-00000.safetensors"
TABLES = "weights/tables.safetensors"
OTHER = ("another content", "build the bundle again")


@pytest.fixture
def copy(bundle: Path, tmp_path: Path) -> Path:
    """A bundle of its own to damage (with copied, not linked, weights)."""
    return shutil.copytree(bundle, tmp_path / "copy")


def test_figures(run: Run, bundle: Path) -> None:
    answer = run("inspect", bundle, "--json").json
    assert answer["name"] == "pair"
    assert answer["target"]["parameters"] == TARGET_PARAMETERS
    assert answer["draft"]["parameters"] == DRAFT_PARAMETERS
    assert answer["target"]["weight_bytes"] == 4 * TARGET_PARAMETERS
    assert answer["target"]["storage_dtypes"] == ["F32"]
    assert answer["cache_bytes_per_token"] == {
        "target": TARGET_TOKEN_BYTES,
        "draft": DRAFT_TOKEN_BYTES,
    }
    memory = answer["memory_bytes"]
    assert memory["target_cache"] == 4 * 64 * TARGET_TOKEN_BYTES
    assert memory["draft_cache"] == 4 * 64 * DRAFT_TOKEN_BYTES
    # The draft's session holds the output head (300×64) once more.
    assert memory["draft_weights"] == 4 * (DRAFT_PARAMETERS + 300 * 64)
    assert memory["total"] == (
        4 * (TARGET_PARAMETERS + DRAFT_PARAMETERS + 300 * 64)
        + 4 * 64 * (TARGET_TOKEN_BYTES + DRAFT_TOKEN_BYTES)
    )
    assert answer["verified"] is None


def test_a_dflash2_draft_says_what_it_has(run: Run, bigram_config: Path, tmp_path: Path) -> None:
    pair, output = bigram_config.parent, tmp_path / "bundle"
    draft = write_dflash2(tmp_path / "draft", pair / "draft", group=32, rank=12, top_k=8)
    own = ["--target-checkpoint", pair / "target", "--draft-checkpoint", draft, "-o", output]
    run.well("build", "--max-batch", 1, *own)
    text = run("inspect", output).out
    assert "groups of 32 channels; a selector of rank 12 among the 8 likeliest tokens" in text
    sizes = {"group": 32, "rank": 12, "top_k": 8}
    assert run("inspect", output, "--json").json["draft"]["dflash2"] == sizes


def test_text(run: Run, bundle: Path) -> None:
    outcome = run("inspect", bundle)
    assert outcome.code == 0 and outcome.err == ""
    text = outcome.out
    assert "pair: qwen3 target with a DFlash draft, for executor cpu (float32 compute)" in text
    assert f"{TARGET_PARAMETERS:,} parameters in F32" in text
    assert "taps layers 1, 2, 3 of 6; sliding windows none" in text
    assert "cache   768 + 256 bytes per token (target + draft)" in text
    assert "files present with their sizes" in text


@pytest.mark.parametrize(
    ("name", "change", "pieces"),
    [
        ("draft.onnx", None, ["draft.onnx", "is missing"]),
        ("target.onnx", lambda data: data + b"x", ["target.onnx", "bytes, the manifest says"]),
        (WEIGHTS, lambda data: data[:-4], ["shard-00000.safetensors", "bytes, the manifest says"]),
        ("manifest.json", lambda data: data[:-9], ["manifest.json", "not valid JSON"]),
        ("target_only.onnx", lambda data: data[:-1] + b"x", ["target_only.onnx", *OTHER]),
        ("tokenizer/tokenizer.json", lambda data: b" " + data[:-1], ["tokenizer.json", *OTHER]),
        (TABLES, lambda data: data[:-4096] + bytes(4096), ["tables.safetensors", *OTHER]),
        (WEIGHTS, lambda data: data[:8] + b" " + data[9:], ["shard-00000.safetensors", "header"]),
    ],
)
def test_damage_is_found_on_opening(
    run: Run,
    copy: Path,
    name: str,
    change: Callable[[bytes], bytes] | None,
    pieces: list[str],
) -> None:
    """Manifests with one wrong value are in tests/frozen."""
    if change is None:
        (copy / name).unlink()
    else:
        (copy / name).write_bytes(change((copy / name).read_bytes()))
    run("inspect", copy).fails(1, *pieces)


def _flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def test_changed_weights_are_found_where_they_were_hashed(
    run: Run, own_pair: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "hashed"
    arguments = ["--copy-weights", "--hash-weights"]
    run.well("build", "--target", own_pair, "-o", folder, *arguments)
    run.well("inspect", folder, "--verify")
    _flip(folder / "weights" / "target" / "shard-00000.safetensors", -1)
    run.well("inspect", folder)
    run("inspect", folder, "--verify").fails(1, "shard-00000", "another content")

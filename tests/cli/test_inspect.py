"""`inspect`: figures worked out by hand, and every kind of damage found."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Run

# 6 target layers and 2 draft layers of 2 KV heads × 8, K and V, float32.
TARGET_TOKEN_BYTES = 6 * 2 * 2 * 8 * 4
DRAFT_TOKEN_BYTES = 2 * 2 * 2 * 8 * 4
# Per layer: q and o 64×32, k and v 64×16, three of 64×24, norms 2×64 + 2×8.
LAYER = 2 * 64 * 32 + 2 * 64 * 16 + 3 * 64 * 24 + 2 * 64 + 2 * 8
TARGET_PARAMETERS = 6 * LAYER + 2 * 300 * 64 + 64
DRAFT_PARAMETERS = 2 * LAYER + 64 * 3 * 64 + 2 * 64


@pytest.fixture
def copy(bundle: Path, tmp_path: Path) -> Path:
    """A bundle of its own to damage (with copied, not linked, weights)."""
    return shutil.copytree(bundle, tmp_path / "copy")


def _edit(folder: Path, change: Any) -> None:
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


def test_figures(run: Run, bundle: Path) -> None:
    answer = run("inspect", bundle, "--json").json
    assert answer["name"] == "pair"
    assert answer["target"]["parameters"] == TARGET_PARAMETERS
    assert answer["draft"]["parameters"] == DRAFT_PARAMETERS
    assert answer["target"]["weight_bytes"] == 4 * TARGET_PARAMETERS
    assert answer["target"]["storage_dtypes"] == ["F32"]
    assert answer["limits"] == {
        "max_batch": 4,
        "max_seq_len": 64,
        "block_size": 8,
        "prefill_chunk": 64,
    }
    assert answer["cache_bytes_per_token"] == {
        "target": TARGET_TOKEN_BYTES,
        "draft": DRAFT_TOKEN_BYTES,
    }
    memory = answer["memory_bytes"]
    assert (memory["batch"], memory["context"]) == (4, 64)
    assert memory["target_cache"] == 4 * 64 * TARGET_TOKEN_BYTES
    assert memory["draft_cache"] == 4 * 64 * DRAFT_TOKEN_BYTES
    # The draft's session holds the output head (300×64) once more.
    assert memory["draft_head"] == 4 * 300 * 64
    assert memory["total"] == (
        4 * (TARGET_PARAMETERS + DRAFT_PARAMETERS + 300 * 64)
        + 4 * 64 * (TARGET_TOKEN_BYTES + DRAFT_TOKEN_BYTES)
    )
    assert answer["verified"] is None


def test_batch_and_context(run: Run, bundle: Path) -> None:
    memory = run("inspect", bundle, "--batch", 3, "--context", 1000, "--json").json["memory_bytes"]
    assert (memory["batch"], memory["context"]) == (3, 1000)
    assert memory["target_cache"] == 3000 * TARGET_TOKEN_BYTES
    run("inspect", bundle, "--batch", 0).fails(2, "--batch")


def test_users_that_fit_on_a_gpu(run: Run, bundle: Path) -> None:
    fit = run("inspect", bundle, "--gpu", "rtx-5090", "--context", 100, "--json").json["fit"]
    assert fit["token"] == TARGET_TOKEN_BYTES + DRAFT_TOKEN_BYTES
    assert fit["weights"] == 4 * (TARGET_PARAMETERS + DRAFT_PARAMETERS + 300 * 64)
    # 4 sequences × block 8 × 300 logits beside the runtime's allowance.
    assert fit["workspace"] == (4 << 30) + 4 * 8 * 300 * 4
    room = 32 * 10**9 - fit["weights"] - fit["workspace"]
    assert fit["users"]["100"] == room // (100 * fit["token"])
    assert run("inspect", bundle, "--json").json["fit"] is None
    shown = run("inspect", bundle, "--gpu", "rtx-5090").out
    assert "fit     projected: GeForce RTX 5090, 29.8 GiB: weights" in shown and " of 64" in shown
    assert " (they and caches as the CPU holds them, no engine's; see `plan`), workspace" in shown
    run("inspect", bundle, "--gpu", "rtx-509").fails(2, "nearest: 'rtx-5090'")


def test_text(run: Run, bundle: Path) -> None:
    outcome = run("inspect", bundle)
    assert outcome.code == 0 and outcome.err == ""
    text = outcome.out
    assert "pair: qwen3 target with a DFlash draft, for executor cpu (float32 compute)" in text
    assert f"{TARGET_PARAMETERS:,} parameters in F32" in text
    assert "taps layers 1, 2, 3 of 6; sliding windows none" in text
    assert "cache   768 + 256 bytes per token (target + draft)" in text
    assert "files present with their sizes" in text


def test_verify(run: Run, bundle: Path) -> None:
    outcome = run("inspect", bundle, "--verify", "--json")
    assert outcome.code == 0
    checks = outcome.json["verified"]
    assert "target.onnx: sha256 matches" in checks
    weights = "weights/target/shard-00000.safetensors: header hash matches; content NOT checked"
    assert any(line.startswith(weights) for line in checks)
    assert len(checks) == len(outcome.json["files"])


def _remove(folder: Path) -> None:
    (folder / "draft.onnx").unlink()


def _grow(folder: Path) -> None:
    with (folder / "target.onnx").open("ab") as file:
        file.write(b"x")


def _truncate(folder: Path) -> None:
    path = folder / "weights" / "draft" / "shard-00000.safetensors"
    path.write_bytes(path.read_bytes()[:-4])


def _version(folder: Path) -> None:
    _edit(folder, lambda manifest: manifest.update(schema_version=2))


def _no_version(folder: Path) -> None:
    _edit(folder, lambda manifest: manifest.pop("schema_version"))


def _escape(folder: Path) -> None:
    (folder.parent / "x").touch()
    _edit(folder, lambda m: m["files"].append({"path": "../x", "bytes": 0}))


def _absolute(folder: Path) -> None:
    _edit(folder, lambda m: m["files"].append({"path": "/etc/passwd", "bytes": 0}))


def _control(folder: Path) -> None:
    _edit(folder, lambda m: m["files"].append({"path": "a\nerror: b\x1b[31m", "bytes": 0}))


def _nan(folder: Path) -> None:
    _edit(folder, lambda manifest: manifest["target"].update(layers=float("nan")))


def _unknown(folder: Path) -> None:
    _edit(folder, lambda manifest: manifest.update(pickle="x"))


def _wrong_type(folder: Path) -> None:
    _edit(folder, lambda manifest: manifest["limits"].update(max_batch="4"))


def _boolean(folder: Path) -> None:
    _edit(folder, lambda manifest: manifest["limits"].update(max_batch=True))


def _negative(folder: Path) -> None:
    _edit(folder, lambda manifest: manifest["target"].update(heads=-1))


def _endless(folder: Path) -> None:
    _edit(folder, lambda manifest: manifest["target"].update(layers=10**11))


def _hash(folder: Path) -> None:
    _edit(folder, lambda manifest: manifest["files"][0].update(sha256="00"))


def _cut(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_text(path.read_text()[:-20])


def _list(folder: Path) -> None:
    (folder / "manifest.json").write_text("[]")


def _binary(folder: Path) -> None:
    (folder / "manifest.json").write_bytes(b"\xff\xfe")


@pytest.mark.parametrize(
    ("damage", "pieces"),
    [
        (_remove, ["draft.onnx", "is missing"]),
        (_grow, ["target.onnx", "bytes, the manifest says"]),
        (_truncate, ["shard-00000.safetensors", "bytes, the manifest says"]),
        (_version, ["manifest.json", "schema version 2", "reads 1"]),
        (_no_version, ["manifest.json", "schema version None"]),
        (_escape, ["manifest.json", "leaves the bundle"]),
        (_absolute, ["manifest.json", "leaves the bundle"]),
        (_control, [r"a\nerror: b\x1b[31m", "is missing"]),
        (_nan, ["manifest.json", "NaN"]),
        (_unknown, ["manifest.json", "pickle"]),
        (_wrong_type, ["manifest.json", "limits.max_batch", "integer"]),
        (_boolean, ["manifest.json", "limits.max_batch", "integer"]),
        (_negative, ["manifest.json", "target.heads"]),
        (_endless, ["manifest.json", "target.layers"]),
        (_hash, ["manifest.json", "files.0.sha256"]),
        (_cut, ["manifest.json", "not valid JSON"]),
        (_list, ["manifest.json", "JSON object"]),
        (_binary, ["manifest.json", "UTF-8"]),
    ],
)
def test_damage_is_found_on_opening(run: Run, copy: Path, damage: Any, pieces: list[str]) -> None:
    damage(copy)
    run("inspect", copy).fails(1, *pieces)
    run("generate", copy, "--prompt", "a").fails(1, *pieces)


def _flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["target_only.onnx", "tokenizer/tokenizer.json"])
def test_changed_content_is_found_by_verify(run: Run, copy: Path, name: str) -> None:
    _flip(copy / name, -1)
    assert run("inspect", copy).code == 0
    run("inspect", copy, "--verify").fails(1, name, "another content", "build the bundle again")


def test_a_changed_weights_header_is_found_by_verify(run: Run, copy: Path) -> None:
    weights = copy / "weights" / "draft" / "shard-00000.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data.replace(b'"hidden_norm.weight"', b'"hidden_norm.weighs"'))
    run("inspect", copy, "--verify").fails(1, "shard-00000", "another safetensors header")


def test_changed_weights_are_found_where_they_were_hashed(
    run: Run, own_pair: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "hashed"
    arguments = ["--copy-weights", "--hash-weights"]
    assert run("build", "--target", own_pair, "-o", folder, *arguments).code == 0
    assert run("inspect", folder, "--verify").code == 0
    _flip(folder / "weights" / "target" / "shard-00000.safetensors", -1)
    assert run("inspect", folder).code == 0
    run("inspect", folder, "--verify").fails(1, "shard-00000", "another content")

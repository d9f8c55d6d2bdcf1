"""Manifests of bundles: every field, and the bytes of the file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from tests.frozen import canonical
from tests.frozen.command_line import run_well
from tests.frozen.pairs import write_pair

PAGED = ("--kv-layout", "paged", "--page-size", "16", "--kv-pages", "96")
ENGINES = ("--executor", "tensorrt-rtx", "--max-seq-len", "100", "--max-batch", "2")
BUNDLES: Mapping[str, Sequence[str]] = {
    "demo": ("--target", "demo", "--hash-weights"),
    "demo-paged": ("--target", "demo", *PAGED, "--copy-weights", "--max-batch", "3"),
    "demo-fp8": ("--target", "demo", "--kv-dtype", "fp8", "--block-size", "4"),
    "demo-paged-fp8": ("--target", "demo-gpt-oss", *PAGED, "--kv-dtype", "fp8"),
    "demo-nvfp4": ("--target", "demo-nvfp4"),
    "demo-gpt-oss": ("--target", "demo-gpt-oss", "--max-seq-len", "512"),
    "engines-bf16": ("--target", "PAIR", *ENGINES, "--arch", "sm_120"),
    "engines-fp16": ("--target", "PAIR", *ENGINES, "--arch", "sm_89", "--precision", "fp16"),
}
PAIR_OF_ENGINES = "qwen3"


def write_bundles(folder: Path) -> None:
    """Builds every bundle into a folder of its name."""
    write_pair(PAIR_OF_ENGINES, folder / "pair")
    (folder / "pair" / "pair.yaml").write_text(
        "description: tiny\ntarget: {checkpoint: target}\ndraft: {checkpoint: draft}\n"
    )
    from tests.standins.stub_builder import StubBuilder

    # TensorRT-RTX's parser and configuration are real, an engine is a few bytes.
    with mock.patch("tensorrt_rtx.Builder", StubBuilder):
        for name, words in BUNDLES.items():
            given = [folder / "pair" / "pair.yaml" if word == "PAIR" else word for word in words]
            run_well("build", *given, "-o", folder / name)


def manifest_facts(folder: Path) -> dict[str, Any]:
    """The manifests of `write_bundles`, without what depends on the machine and on versions.

    Sizes and hashes of graphs and texts are those of the canonical files, once the recorded ones
    have been found right. An engine and its summary have none: they are the library's.
    """
    return {name: _manifest(folder / name) for name in BUNDLES}


def _manifest(bundle: Path) -> dict[str, Any]:
    text = (bundle / "manifest.json").read_text(encoding="utf-8")
    manifest = json.loads(text)
    for file in manifest["files"]:
        recorded = json.dumps(file, indent=2).replace("\n", "\n    ")
        _make_canonical(file, bundle)
        text = text.replace(recorded, json.dumps(file))
    manifest["created_by"] = canonical.masked(manifest["created_by"])
    for library, version in manifest["libraries"].items():
        text = text.replace(f'"{library}": "{version}"', f'"{library}": "VERSION"')
        manifest["libraries"][library] = "VERSION"
    if manifest["engines"] is not None:
        version = manifest["engines"]["library_version"]
        text = text.replace(f'"library_version": "{version}"', '"library_version": "VERSION"')
        manifest["engines"]["library_version"] = "VERSION"
    manifest["files"] = {file.pop("path"): file for file in manifest["files"]}
    return {"sha256": canonical.sha256(canonical.masked(text, bundle)), **manifest}


def _make_canonical(file: dict[str, Any], bundle: Path) -> None:
    """Checks the size and hash of a manifest's file; makes them those of canonical bytes."""
    path = bundle / file["path"]
    raw = path.read_bytes()
    assert len(raw) == file["bytes"], path
    assert file["sha256"] in (None, hashlib.sha256(raw).hexdigest()), path
    if file["path"].startswith("engines/"):
        file["bytes"] = 0
        file["sha256"] = None
        return
    data = canonical.file_bytes(path, bundle)
    file["bytes"] = len(data)
    if file["sha256"] is not None:
        file["sha256"] = canonical.sha256(data)

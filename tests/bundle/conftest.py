"""Tiny NumPy pairs and a build in one call; a subprocess that can be stopped in mid-build."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from dflash_trt.building.spec import BuildSpec
from dflash_trt.bundle.manifest import Manifest
from dflash_trt.models.draft import read_draft
from dflash_trt.models.pair_check import check_pair
from dflash_trt.models.target import read_target
from tests.models.conftest import (
    DRAFT_CONFIG,
    TARGET_CONFIG,
    draft_shapes,
    target_shapes,
    write_checkpoint,
)
from tests.pairs import write_bundle


@dataclass
class Watcher:
    """Notes the stages of a build and the bytes done in each; `at` is called on entering one."""

    stages: list[tuple[str, int | None]] = field(default_factory=list)
    done: dict[str, int] = field(default_factory=dict)
    at: Callable[[str], None] = lambda name: None

    def stage(self, name: str, total_bytes: int | None) -> None:
        self.stages.append((name, total_bytes))
        self.done[name] = 0
        self.at(name)

    def advance(self, count: int) -> None:
        self.done[self.stages[-1][0]] += count


def write_pair(folder: Path, *, shards: int = 1, dtype: str = "F32") -> Path:
    """target/ and draft/ under `folder`, which is returned."""
    target = target_shapes(TARGET_CONFIG)
    write_checkpoint(folder / "target", TARGET_CONFIG, target, dtype, shards)
    write_checkpoint(folder / "draft", DRAFT_CONFIG, draft_shapes(DRAFT_CONFIG, 3), dtype)
    return folder


def build_pair(
    folder: Path, destination: Path, *, watcher: Watcher | None = None, **options: Any
) -> Manifest:
    """Builds the pair in `folder`."""
    pair = check_pair(read_target(folder / "target"), read_draft(folder / "draft"))
    limits = {"max_batch": 3, "max_seq_len": 100}
    progress = watcher or Watcher()
    return write_bundle(pair, destination, BuildSpec(**options), progress, **limits).manifest


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    """A folder with a tiny pair."""
    return write_pair(tmp_path / "pair")


def read_manifest_json(folder: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
    return value

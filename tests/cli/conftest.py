"""The command line in this process, and one bundle of bigrams for all that only read it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from dflash_trt.bundle.bundle import open_bundle
from dflash_trt.cli.main import main
from dflash_trt.decoding.schedule import BlockSchedule, merge_ranges
from dflash_trt.decoding.tuning.bundle_schedule import write_schedule
from dflash_trt.errors import DflashError
from dflash_trt.hardware import kernels as attention
from tests.cli.bigram import write_bigram_pair
from tests.decoding.schedules import invent_measurements

if TYPE_CHECKING:
    from tests.standins.plugin_tensorrt import PluginTensorRt


def refusal_of(read: Callable[..., object], *given: object) -> str:
    """What a reader of files refuses, as wrong usage in one printable line."""
    with pytest.raises(DflashError) as caught:
        read(*given)
    assert caught.value.exit_code == 2
    message = str(caught.value)
    assert message.isprintable() and len(message) < 500
    return message


@dataclass(frozen=True)
class Outcome:
    """What a command did: its exit code and its two outputs."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """stdout as strict JSON: no NaN, no Infinity."""

        def refuse(constant: str) -> None:
            raise AssertionError(f"{constant} is not JSON")

        return json.loads(self.out, parse_constant=refuse)

    def fails(self, code: int, *pieces: str) -> str:
        """Asserts a failure of one error line that contains every piece; returns the line."""
        errors = [line for line in self.err.splitlines() if line.startswith("error: ")]
        assert self.code == code, (self.code, self.err)
        assert len(errors) == 1, self.err
        assert self.err.splitlines()[-1] == errors[0], self.err
        assert "Traceback" not in self.err and len(errors[0]) < 600
        for piece in pieces:
            assert piece in errors[0], errors[0]
        return errors[0]


@dataclass(frozen=True)
class Run:
    """Runs `dflash-trt ARGUMENTS`; an exception that escapes fails the test."""

    capsys: pytest.CaptureFixture[str]

    def __call__(self, *arguments: object) -> Outcome:
        self.capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        captured = self.capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    def well(self, *arguments: object) -> Outcome:
        """As a call; the command must succeed."""
        outcome = self(*arguments)
        assert outcome.code == 0, (outcome.out, outcome.err)
        return outcome


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return Run(capsys)


@dataclass(frozen=True)
class Build:
    """Runs `build` to `folder`; one that fails must leave nothing there or beside it."""

    run: Run
    folder: Path

    def __call__(self, target: object, *options: object) -> Outcome:
        root = self.folder.parents[1]
        before = sorted(root.rglob("*"))
        outcome = self.run("build", "--target", target, "-o", self.folder, *options)
        assert outcome.code == 0 or (outcome.out == "" and sorted(root.rglob("*")) == before)
        return outcome

    def well(self, target: object, *options: object) -> Outcome:
        """As a call; the command must succeed."""
        outcome = self(target, *options)
        assert outcome.code == 0, (outcome.out, outcome.err)
        return outcome

    @property
    def manifest(self) -> dict[str, Any]:
        """That of the bundle."""
        manifest: dict[str, Any] = json.loads((self.folder / "manifest.json").read_text())
        return manifest


@pytest.fixture
def build(run: Run, tmp_path: Path) -> Build:
    """To a folder in one that is not there yet."""
    return Build(run, tmp_path / "out" / "b")


def write_config(folder: Path, **keys: object) -> Path:
    """Writes the configuration of the checkpoints `target` and `draft` in `folder`."""
    config = {role: {"checkpoint": role} for role in ("target", "draft")}
    path = folder / "pair.yaml"
    path.write_text(json.dumps({"description": "tiny", **config, **keys}))
    return path


def edit_manifest(folder: Path, change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    """Changes the manifest of the bundle in `folder`; returns it."""
    path = folder / "manifest.json"
    manifest: dict[str, Any] = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))
    return manifest


@pytest.fixture(scope="session")
def bigram_config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The YAML of a bigram pair that no test changes."""
    return write_bigram_pair(tmp_path_factory.mktemp("bigram"))


@pytest.fixture(scope="session")
def engine_config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The YAML of a bigram pair whose head size engines have attention kernels for."""
    return write_bigram_pair(tmp_path_factory.mktemp("bigram-engines"), head_dim=16)


@pytest.fixture(scope="session")
def bundle(bigram_config: Path) -> Path:
    """A bundle of it that no test changes."""
    folder = bigram_config.parent / "bundle"
    assert main(["build", "--target", str(bigram_config), "-o", str(folder)]) == 0
    return folder


@pytest.fixture
def own_pair(bigram_config: Path, tmp_path: Path) -> Path:
    """The YAML of a copy of the pair for this test to break."""
    root = tmp_path / "pair"
    shutil.copytree(bigram_config.parent, root, ignore=shutil.ignore_patterns("bundle"))
    return root / "pair.yaml"


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> PluginTensorRt:
    """A TensorRT with plugins that `build` finds, and a GPU beside it."""
    from tests.standins.plugin_tensorrt import stand_in_builder

    return stand_in_builder(monkeypatch, tmp_path)


@pytest.fixture
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The user's cache folder of this test, outside of what it looks through for remains."""
    home = tmp_path.with_name(f"{tmp_path.name}-cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    return home / "dflash-trt"


@pytest.fixture(scope="session")
def slow_drafts(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle, tuned where a step of block 8 takes 1.7 plain ones."""
    folder = tmp_path_factory.mktemp("slow-drafts") / "bundle"
    shutil.copytree(bundle, folder)
    measured = invent_measurements([4, 8], per_row=0.15)
    blocks = merge_ranges([8] * 4)
    write_schedule(
        open_bundle(folder), BlockSchedule(blocks=blocks, executor="cpu", measured=measured)
    )
    return folder


def split_short_caches(monkeypatch: pytest.MonkeyPatch, positions: int) -> None:
    """Has kernels split caches of twice as many positions, into parts of so many."""
    monkeypatch.setattr(attention, "ONE_LAUNCH", 2 * positions)
    monkeypatch.setattr(attention, "SPLIT_POSITIONS", positions)

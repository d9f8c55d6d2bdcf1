"""A bundle is whole or absent: failures, kills, full disks and builds at the same time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dflash_trt.bundle.bundle import open_bundle, verify_bundle
from dflash_trt.core import publish
from dflash_trt.errors import DflashError
from tests.bundle.conftest import Watcher, build_pair

# Runs in a process of its own: waits at the stage named, until a line comes on stdin.
WAITING_BUILD = """
import sys
from pathlib import Path
from dflash_trt.core import publish
from dflash_trt.errors import DflashError
from tests.bundle.conftest import Watcher, build_pair

def wait(name):
    if name == sys.argv[3]:
        print("waiting", flush=True)
        sys.stdin.readline()

def rename(self, target):
    wait("rename" if self.name == "new" else "")
    return real(self, target)

real, Path.rename = Path.rename, rename
publish._exchange = lambda new, destination: False
try:
    build_pair(Path(sys.argv[1]), Path(sys.argv[2]), watcher=Watcher(at=wait),
               hash_weights=True, overwrite="overwrite" in sys.argv)
except DflashError as error:
    print(error)
    sys.exit(error.exit_code)
"""

StartBuild = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start_build(pair: Path) -> Iterator[StartBuild]:
    """Starts a build of `pair` in another process and waits until it has reached a stage."""
    running: list[subprocess.Popen[str]] = []

    def start(destination: Path, stage: str, *more: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", WAITING_BUILD, str(pair), str(destination), stage, *more],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        running.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        return process

    yield start
    for process in running:
        process.kill()
        process.communicate()


def _check_whole(folder: Path) -> None:
    verify_bundle(open_bundle(folder), lambda count: None)


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    ("stage", "error"), [("graphs", KeyboardInterrupt), ("hashing weights", OSError)]
)
def test_an_exception_leaves_nothing(
    pair: Path, tmp_path: Path, stage: str, error: type[BaseException]
) -> None:
    def fail(name: str) -> None:
        if name == stage:
            raise error("in mid-build")

    # Folders made for the bundle go too; those that were there stay.
    (tmp_path / "there").mkdir()
    wanted = DflashError if error is OSError else error
    with pytest.raises(wanted, match="in mid-build"):
        build_pair(
            pair, tmp_path / "there" / "a" / "b", watcher=Watcher(at=fail), hash_weights=True
        )
    assert _names(tmp_path) == ["pair", "there"]
    assert _names(tmp_path / "there") == []


@pytest.mark.parametrize("stage", ["graphs", "rename"])
def test_a_failed_replacement_leaves_the_old_bundle(
    pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    def fail(name: str) -> None:
        if name == stage:
            raise OSError(5, "Input/output error")

    def rename(self: Path, target: Path) -> Path:
        fail("rename" if self.name == "new" else "")
        return real(self, target)

    monkeypatch.setattr(publish, "_exchange", lambda new, destination: False)
    build_pair(pair, tmp_path / "b")
    before = [(tmp_path / "b").stat().st_ino, (tmp_path / "b" / "manifest.json").stat().st_ino]
    real = Path.rename
    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(DflashError, match="Input/output error"):
        build_pair(pair, tmp_path / "b", watcher=Watcher(at=fail), overwrite=True)
    assert _names(tmp_path) == ["b", "pair"]
    after = [(tmp_path / "b").stat().st_ino, (tmp_path / "b" / "manifest.json").stat().st_ino]
    assert after == before
    _check_whole(tmp_path / "b")


def test_a_bundle_is_replaced_in_one_step(
    pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody sees the folder missing, and a kill has no moment between two renames."""
    build_pair(pair, tmp_path / "b")
    before = (tmp_path / "b").stat().st_ino
    monkeypatch.setattr(Path, "rename", lambda *paths: pytest.fail("a second step"))
    build_pair(pair, tmp_path / "b", overwrite=True)
    assert (tmp_path / "b").stat().st_ino != before
    assert _names(tmp_path) == ["b", "pair"]
    _check_whole(tmp_path / "b")


def test_the_bundle_has_the_usual_permissions(pair: Path, tmp_path: Path) -> None:
    previous = os.umask(0o027)
    try:
        build_pair(pair, tmp_path / "b")
    finally:
        os.umask(previous)
    assert (tmp_path / "b").stat().st_mode & 0o777 == 0o750
    assert (tmp_path / "b" / "manifest.json").stat().st_mode & 0o777 == 0o640


def test_kill_9_in_mid_build(pair: Path, tmp_path: Path, start_build: StartBuild) -> None:
    parent = tmp_path / "out [1]*"  # a name that means something to glob
    destination = parent / "b [x]"
    process = start_build(destination, "graphs")
    assert len(_names(parent)) == 1  # the temporary folder
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert not destination.exists()
    assert len(_names(parent)) == 1
    build_pair(pair, destination)
    assert _names(parent) == ["b [x]"]
    _check_whole(destination)


def test_kill_9_in_mid_replacement(pair: Path, tmp_path: Path, start_build: StartBuild) -> None:
    """Killed between the two renames that some filesystems need: the old bundle comes back."""
    build_pair(pair, tmp_path / "b")
    before = (tmp_path / "b").stat().st_ino
    process = start_build(tmp_path / "b", "rename", "overwrite")
    process.kill()
    process.wait()
    assert not (tmp_path / "b").exists()
    with pytest.raises(DflashError, match="already exists"):
        build_pair(pair, tmp_path / "b")
    assert (tmp_path / "b").stat().st_ino == before
    _check_whole(tmp_path / "b")
    build_pair(pair, tmp_path / "b", overwrite=True)
    assert _names(tmp_path) == ["b", "pair"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_running_build_is_left_alone(
    pair: Path, tmp_path: Path, start_build: StartBuild, overwrite: bool
) -> None:
    """Two builds of one output: the first to finish wins, the other overwrites it or says so."""
    destination = tmp_path / "b"
    if overwrite:
        build_pair(pair, destination)
    slow = start_build(destination, "graphs", *["overwrite"] * overwrite)
    build_pair(pair, destination, overwrite=overwrite)
    inode = (destination / "manifest.json").stat().st_ino
    out, _ = slow.communicate("go on\n")
    refusal = (
        f"{destination}: was built by another process meanwhile; "
        "choose another -o or add --overwrite\n"
    )
    assert (slow.returncode, out) == ((0, "") if overwrite else (2, refusal))
    assert _names(tmp_path) == ["b", "pair"]
    assert ((destination / "manifest.json").stat().st_ino != inode) == overwrite
    _check_whole(destination)


def test_a_symlink_to_a_bundle_is_followed(pair: Path, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "b").symlink_to(tmp_path / "disk" / "b")
    build_pair(pair, tmp_path / "b")
    build_pair(pair, tmp_path / "b", overwrite=True)
    assert (tmp_path / "b").is_symlink()
    assert _names(tmp_path / "disk") == ["b"]
    _check_whole(tmp_path / "disk" / "b")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Mounts a tmpfs of so many KiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = False

    def mount(kibibytes: int) -> Path:
        nonlocal mounted
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={kibibytes}k", "tmpfs", str(folder)],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            pytest.skip(f"cannot mount a tmpfs: {done.stderr.strip()}")
        mounted = True
        return folder

    yield mount
    if mounted:
        subprocess.run(["umount", str(folder)], check=True)


# What lies in a bundle of the tiny pair, in KiB: weights 103, tables 26, graphs about 70 each.
@pytest.mark.parametrize("kibibytes", [4, 112, 180])
def test_a_full_disk(
    pair: Path, tmp_path: Path, small_disk: Callable[[int], Path], kibibytes: int
) -> None:
    disk = small_disk(kibibytes)
    with pytest.raises(DflashError) as caught:
        build_pair(pair, disk / "b")
    message = str(caught.value)
    assert str(disk) in message and "free" in message
    assert ".building-" not in message
    assert caught.value.exit_code == 1
    assert _names(disk) == []

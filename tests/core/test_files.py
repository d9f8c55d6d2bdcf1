"""Files that appear whole or not at all, and files that are not trusted."""

from __future__ import annotations

import io
import os
import socket
import threading
import time
import tracemalloc
from collections.abc import Callable
from http.client import HTTPException, HTTPResponse, IncompleteRead
from pathlib import Path
from typing import cast

import pytest

from dflash_trt.core.files import FileKind, exists, find_file, open_file, read_bytes, read_text
from dflash_trt.core.publish import replace_file, replacing
from dflash_trt.core.strict_json import MAX_VALUES, parse_json
from dflash_trt.core.yaml_files import MOST_VALUES, parse_yaml
from dflash_trt.errors import DflashError
from dflash_trt.serving.client.openai_chat import MAX_BYTES, read_reply


def _listen(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


def _truncate(path: Path) -> None:
    with path.open("wb") as sparse:
        sparse.truncate(3 << 40)


HOSTILE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a pipe": (os.mkfifo, "is a pipe, not a regular file"),
    "a folder": (Path.mkdir, "is a folder, not a regular file"),
    "a socket": (_listen, "is a socket, not a regular file"),
    "a link to a device": (lambda path: path.symlink_to("/dev/zero"), "is a device, not a regular"),
    "a link to nothing": (lambda path: path.symlink_to("nothing"), "is a link to nothing"),
    "links in a circle": (lambda path: path.symlink_to(path), "cannot be read"),
    "a sparse file": (_truncate, "is larger than 16 MiB, too large for a configuration"),
    "a file without a size": (lambda path: path.symlink_to("/proc/self/maps"), "is a link out of"),
    "a link out of the folder": (lambda path: path.symlink_to("../secret"), "is a link out of its"),
}


@pytest.mark.parametrize("what", HOSTILE)
@pytest.mark.parametrize("named", [False, True])
def test_what_is_no_file_of_its_folder(
    tmp_path: Path, what: str, named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "secret").write_text("secret")
    make, message = HOSTILE[what]
    path = tmp_path / "model" / "f"
    path.parent.mkdir()
    monkeypatch.chdir(path.parent)  # the path of a socket may have 107 characters
    make(Path(path.name) if what == "a socket" else path)
    assert exists(path)
    if named and "link out" in message:  # the user may name a link to any regular file
        assert read_bytes(path, FileKind.CONFIG, named=True)
        return
    started = time.perf_counter()
    with pytest.raises(DflashError) as caught:
        read_bytes(path, FileKind.CONFIG, named=named)
    assert time.perf_counter() - started < 1
    assert str(path) in str(caught.value) and message in str(caught.value)
    assert "secret" not in caught.value.what.replace(str(tmp_path / "secret"), "")
    assert caught.value.exit_code == (2 if named else 1)


def test_the_hubs_own_links_are_followed_and_no_others(tmp_path: Path) -> None:
    ours, other = tmp_path / "models--a--b", tmp_path / "models--a--c"
    snapshot = ours / "snapshots" / "1234" / "draft"
    for folder in (ours / "blobs", other / "blobs", snapshot):
        folder.mkdir(parents=True)
    for blob in (ours / "blobs" / "12ab", other / "blobs" / "34cd", tmp_path / "5678"):
        blob.write_text("{}")
    (ours / "blobs" / "moved").symlink_to(tmp_path / "5678")
    for name, blob in {"good": "12ab", "moved": "moved"}.items():
        (snapshot / name).symlink_to(f"../../../blobs/{blob}")
    (snapshot / "other").symlink_to(other / "blobs" / "34cd")
    for folder in (snapshot, tmp_path / "by-link"):
        if not folder.exists():
            folder.symlink_to(snapshot)
        assert find_file(folder / "good") == ours / "blobs" / "12ab"
        for name in ("moved", "other"):
            with pytest.raises(DflashError, match="is a link out of its folder"):
                open_file(folder / name)


def test_a_folder_that_is_a_link_is_seen_from_above(tmp_path: Path) -> None:
    bundle, outside = tmp_path / "bundle", tmp_path / "outside"
    bundle.mkdir()
    outside.mkdir()
    (outside / "f").write_text("secret")
    (bundle / "weights").symlink_to(outside)
    assert find_file(bundle / "weights" / "f") == outside / "f"
    with pytest.raises(DflashError, match="is a link out of its folder"):
        find_file(bundle / "weights" / "f", within=bundle)


def test_a_file_that_states_no_size_has_a_limit_too(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Path("/proc/self/maps").stat().st_size == 0
    monkeypatch.setattr(FileKind.CONFIG, "limit", 100)
    with pytest.raises(DflashError, match="too large for a configuration"):
        read_text("/proc/self/maps", FileKind.CONFIG, named=True)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"[" + b"{}," * MAX_VALUES + b"{}]", "holds more than 2,000,000 JSON values"),
        (b"[" + b"[]," * MAX_VALUES + b"[]]", "holds more than 2,000,000 JSON values"),
        (b"[" + b"1," * MAX_VALUES + b"1]", "holds more than 2,000,000 JSON values"),
        (b'{"a":' * 101 + b"1" + b"}" * 101, "nested too deeply"),
        (b"[" * 50_000_000, "holds more than 2,000,000 JSON values"),
        (b'["' + b'\\"' * 5_000_000, "not valid JSON"),
    ],
    ids=["objects", "lists", "numbers", "deep", "open", "quotes"],
)
def test_json_is_bounded_before_it_is_made(data: bytes, message: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(DflashError, match=message):
            parse_json(data, "f")
        assert tracemalloc.get_traced_memory()[1] < 3 * len(data) + (1 << 20)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        # An error that quotes such a number would be a traceback.
        ("max_batch: 0x" + "f" * 5000, "is not valid YAML: Exceeds the limit"),
        ("max_batch: " + "9" * 5000, "is not valid YAML: Exceeds the limit"),
        ("a: 1\nb: 2\na: 3", "key 'a' is given twice"),
        # A megabyte of keys took half a minute.
        ("\n".join(f"k{number}: 1" for number in range(MOST_VALUES // 2)), "more than 20,000 keys"),
    ],
    ids=["hexadecimal", "decimal", "twice", "many"],
)
def test_yaml_is_bounded(text: str, message: str) -> None:
    with pytest.raises(DflashError, match=message):
        parse_yaml(text, "pair.yaml")


class Reply(io.BytesIO):
    def __init__(self, content: bytes | HTTPException) -> None:
        super().__init__(content if isinstance(content, bytes) else b"")
        self._content = content
        self.read_bytes = 0

    def read1(self, size: int | None = -1) -> bytes:
        if not isinstance(self._content, bytes):
            raise self._content
        data = super().read1(size)
        self.read_bytes += len(data)
        return data


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"[" * 200_000, "more than 200,000 JSON values"),
        (b'{"a":' * 90_000 + b"1" + b"}" * 90_000, "nested too deeply"),
        (b'{"data": [' + b"{}," * 300_000 + b"{}]}", "more than 200,000 JSON values"),
        (b'{"a": "' + b"x" * (MAX_BYTES + 100) + b'"}', "answers with more than 16 MiB"),
        (b"[]", "no JSON object"),
        (b"\xff", "not UTF-8"),
        (b"", "not valid JSON"),
        (IncompleteRead(b"ab", 9), "breaks off"),
    ],
)
def test_what_no_reply_may_be(content: bytes | HTTPException, what: str) -> None:
    reply = Reply(content)
    with pytest.raises(DflashError, match=what) as caught:
        read_reply(cast(HTTPResponse, reply), "http://a/v1")
    assert caught.value.where == "http://a/v1" and "download" not in caught.value.message
    assert reply.read_bytes <= MAX_BYTES + 1


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("durable", [False, True])
def test_a_failure_leaves_the_old_file(tmp_path: Path, durable: bool) -> None:
    path = tmp_path / "f"
    replace_file(path, b"old", durable=durable)
    (tmp_path / ".f.new").write_bytes(b"what a killed writer left, longer than what follows")
    with pytest.raises(KeyboardInterrupt), replacing(path, durable=durable) as file:
        file.write(b"half")
        raise KeyboardInterrupt
    assert path.read_bytes() == b"old" and _names(tmp_path) == ["f"]
    (tmp_path / ".f.new").write_bytes(b"what a killed writer left, longer than what follows")
    replace_file(path, b"new", durable=durable)
    assert path.read_bytes() == b"new" and _names(tmp_path) == ["f"]


def test_writers_of_one_file_wait_for_each_other(tmp_path: Path) -> None:
    path, contents = tmp_path / "f", [bytes([one]) * 100_000 for one in range(8)]

    def write(content: bytes) -> None:
        with replacing(path) as file:
            for start in range(0, len(content), 10_000):
                file.write(content[start : start + 10_000])
                file.flush()

    threads = [threading.Thread(target=write, args=[one]) for one in contents]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert path.read_bytes() in contents and _names(tmp_path) == ["f"]

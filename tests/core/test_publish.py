"""Files that are replaced: the old one or the new one, whatever happens meanwhile."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from dflash_trt.core.publish import replace_file, replacing


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

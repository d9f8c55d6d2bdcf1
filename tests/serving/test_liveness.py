"""A model whose process is gone is noticed, by its parent, its state and its model.py."""

from __future__ import annotations

import threading
import time
from contextlib import closing
from pathlib import Path

from dflash_trt.serving.server.liveness import LivenessWatch, is_model_running
from tests.waiting import PATIENCE_S, wait_until

PERIOD_S = 0.005


class Model:
    """A process as the test wants it."""

    def __init__(self, *, alive: bool = True, needed: bool = True) -> None:
        self.alive = alive
        self.needed = needed
        self.looks = 0
        self.lost = threading.Event()

    def is_alive(self) -> bool:
        self.looks += 1
        return self.alive

    def watch(self) -> closing[LivenessWatch]:
        return closing(LivenessWatch(self.is_alive, lambda: self.needed, self.lost.set, PERIOD_S))


def test_a_death_is_told() -> None:
    model = Model()
    with model.watch() as watch:
        watch.look()
        wait_until(lambda: model.looks >= 3)
        assert not model.lost.is_set()
        model.alive = False
        assert model.lost.wait(PATIENCE_S)
        model.lost.clear()  # and told to those who come later
        assert model.lost.wait(PATIENCE_S)


def test_one_never_seen_is_not_lost() -> None:
    model = Model(alive=False)
    with model.watch() as watch:
        watch.look()
        assert not model.lost.wait(10 * PERIOD_S)


def test_nobody_waiting_nobody_looks() -> None:
    model = Model(needed=False)
    with model.watch() as watch:
        watch.look()
        watch.look()
        time.sleep(10 * PERIOD_S)
        assert model.looks == 1
        model.alive, model.needed = False, True
        assert model.lost.wait(PATIENCE_S)


def _add(proc: Path, pid: int, state: str, ppid: int, *arguments: str) -> None:
    (proc / str(pid)).mkdir()
    (proc / str(pid) / "stat").write_text(f"{pid} (a (b) c) {state} {ppid} {ppid} 0 0")
    (proc / str(pid) / "cmdline").write_bytes(b"".join(f"{one}\0".encode() for one in arguments))


def test_processes(tmp_path: Path) -> None:
    (tmp_path / "sys").mkdir()
    (tmp_path / "5").mkdir()  # ended between two reads
    _add(tmp_path, 10, "S", 1, "/stub", "/r/tensorrt_llm/1/model.py", "shm")  # another server's
    _add(tmp_path, 11, "S", 7, "/stub", "/r/tensorrt_llm/ensemble/1/model.py", "shm")
    _add(tmp_path, 12, "Z", 7, "/stub", "/r/tensorrt_llm/1/model.py", "shm")
    assert not is_model_running(7, "tensorrt_llm", tmp_path)
    _add(tmp_path, 13, "R", 7, "/stub", "/r/tensorrt_llm/1/model.py", "shm")
    assert is_model_running(7, "tensorrt_llm", tmp_path)
    assert is_model_running(7, "ensemble", tmp_path)
    assert not is_model_running(8, "tensorrt_llm", tmp_path)

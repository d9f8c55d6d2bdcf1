"""A model's process that dies: noticed, told as errors at once, and served after a restart."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tritonclient.utils import InferenceServerException

from dflash_trt.serving.server import ensemble_model
from dflash_trt.serving.server.processes import (
    STOPPED_S,
    ProcessWatch,
    find_models,
    has_dead_child,
)
from dflash_trt.serving.server.tritonserver import TritonServerBinary
from tests.serving.client import (
    CLASSIC,
    ENDLESS,
    LLM,
    StreamClient,
    ask_grpc,
    long_fields,
    make_fields,
)
from tests.serving.conftest import Generate, running_server
from tests.serving.served import PROMPTS
from tests.serving.test_replies import UTILS, Sender
from tests.waiting import PATIENCE_S, wait_until


@pytest.mark.exhaustive
def test_after_a_killed_model_a_restart_serves(
    tritonserver: TritonServerBinary,
    long_repository: Path,
    repository: Path,
    generate: Generate,
) -> None:
    """Triton server 2.51 leaves those waiting that the model had taken; the forwarder tells them.

    It does not start the model again: whoever asks is told at once. Now and then the whole server
    crashes with its model: an error for all, at once.
    """
    fields = long_fields(CLASSIC, PROMPTS[0])
    with running_server(long_repository) as server:
        clients = [StreamClient(server.addresses.grpc) for _ in range(4)]
        for client in clients:
            client.send(CLASSIC, fields, parameters=ENDLESS)
            next(client.receive())
        (model,) = (pid for pid, name in find_models(server.pid).items() if name == LLM)
        os.kill(model, signal.SIGKILL)
        for client in clients:
            with pytest.raises(InferenceServerException, match="tensorrt_llm has died"):
                list(client.receive())
            client.close(cancel=True)
        with suppress(InferenceServerException):  # of a client that has lost the server already
            assert ask_grpc(server.addresses.grpc, CLASSIC, fields).failure
    with running_server(repository) as server:
        answer = ask_grpc(server.addresses.grpc, LLM, make_fields(LLM, PROMPTS[1]))
        assert answer.texts == [generate(PROMPTS[1], max_tokens=48).text]


class _Call:
    """A request to the other model, which takes it and never answers."""

    def __init__(self, **_: Any) -> None:
        self.is_taken = threading.Event()
        CALLS.append(self)

    def exec(self, *, decoupled: bool) -> Iterator[Any]:
        assert decoupled
        self.is_taken.set()
        threading.Event().wait()
        yield


CALLS: list[_Call] = []


def test_what_a_dead_model_had_taken_ends_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The classic model looks for the process of the other one, which Triton server does not."""
    sender = Sender()
    request = SimpleNamespace(
        inputs=list,
        parameters=str,
        request_id=str,
        timeout=int,
        get_response_sender=lambda: sender,
        requested_output_names=list,
    )
    utils = SimpleNamespace(**vars(UTILS), InferenceRequest=_Call)
    utils.TritonError = lambda message, code: (message, code)
    utils.TritonError.INTERNAL = "INTERNAL"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", utils)
    alive = {1: LLM}
    seen = threading.Event()

    def find(_: int) -> dict[int, str]:
        seen.set()
        return dict(alive)

    monkeypatch.setattr(ensemble_model, "find_models", find)
    monkeypatch.setattr(ensemble_model, "_LOOK_S", 0.01)
    config = {"parameters": {"streaming_text": "delta", "max_requests": "4"}}
    config["parameters"] = {k: {"string_value": v} for k, v in config["parameters"].items()}
    paths = {"model_repository": "", "model_version": "1"}
    model = ensemble_model.TritonPythonModel()
    model.initialize({"model_config": json.dumps(config), **paths})
    try:
        model.execute([request])
        assert seen.wait(PATIENCE_S) and CALLS[0].is_taken.wait(PATIENCE_S)
        assert not sender.sent
        alive.clear()
        wait_until(lambda: bool(sender.sent))
        (((message, code), _),) = sender.sent
        assert code == "INTERNAL" and "tensorrt_llm has died" in message
    finally:
        model.finalize()


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
    assert find_models(7, tmp_path) == {11: "ensemble"}
    _add(tmp_path, 13, "R", 7, "/stub", "/r/tensorrt_llm/1/model.py", "shm")
    assert find_models(7, tmp_path) == {11: "ensemble", 13: "tensorrt_llm"}
    assert not find_models(8, tmp_path)


def test_what_is_wrong_with_a_servers_processes(tmp_path: Path) -> None:
    """A stop counts when it lasts; a death at once, also where another has the number by now."""

    def set_state(pid: int, state: str, ppid: int) -> None:
        (tmp_path / str(pid) / "stat").write_text(f"{pid} (a) {state} {ppid} 0")

    _add(tmp_path, 7, "S", 1, "/bin/tritonserver")
    _add(tmp_path, 8, "S", 7, "/stub", "/r/tensorrt_llm/1/model.py", "shm")
    watch = ProcessWatch(7, tmp_path)
    assert watch.find_models() == {"tensorrt_llm"}
    assert watch.find_trouble(0.0) is None
    for pid, name in ((7, "the server's process"), (8, "the process of the model tensorrt_llm")):
        ppid = {7: 1, 8: 7}[pid]
        for state in "Tt":
            set_state(pid, state, ppid)
            assert watch.find_trouble(0.0) is None
            set_state(pid, "R", ppid)
            assert watch.find_trouble(2 * STOPPED_S) is None, "it went on in between"
            set_state(pid, state, ppid)
            assert watch.find_trouble(3 * STOPPED_S) is None
            assert watch.find_trouble(4 * STOPPED_S) == f"{name} is stopped"
            set_state(pid, "S", ppid)
            assert watch.find_trouble(4 * STOPPED_S) is None
    assert not has_dead_child(7, tmp_path)
    for state, ppid in (("Z", 7), ("S", 1)):
        set_state(8, state, ppid)
        assert watch.find_models() == {"tensorrt_llm"}
        assert watch.find_trouble(0.0) == "the process of the model tensorrt_llm has died"
        assert has_dead_child(7, tmp_path) == (state == "Z")

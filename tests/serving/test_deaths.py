"""A model's process that is killed under load: errors now, and service after a restart."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tritonclient.utils import InferenceServerException

from dflash_trt.serving.server.launcher import TritonServer
from dflash_trt.serving.server.tritonserver import TritonServerBinary
from tests.covering import exhaustive
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
from tests.waiting import wait_until


def _stub(server: TritonServer, model: str) -> int:
    """Process id of the model's stub."""
    children = subprocess.run(
        ["ps", "-ww", "-o", "pid=,args=", "--ppid", str(server.pid)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    return next(int(line.split()[0]) for line in children if f"/{model}/" in line)


@pytest.mark.parametrize("model", [LLM, exhaustive(CLASSIC)])
def test_after_a_killed_model_a_restart_serves(
    tritonserver: TritonServerBinary,
    long_repository: Path,
    repository: Path,
    generate: Generate,
    model: str,
) -> None:
    """Triton server 2.51 does not start a killed model again: whoever asks is told at once.

    It leaves those waiting that the model had taken; the forwarder tells its own.
    """
    with running_server(long_repository) as server:
        clients = [StreamClient(server.addresses.grpc) for _ in range(4)]
        for client in clients:
            client.send(model, long_fields(model, PROMPTS[0]), parameters=ENDLESS)
            next(client.receive())
        os.kill(_stub(server, LLM), signal.SIGKILL)
        if model == CLASSIC:
            _expect_errors(clients, "the process of the model tensorrt_llm has died")
        fields = long_fields(model, PROMPTS[1])
        for _ in range(2):
            failure = _find_failure(server, model, fields)
            if "not healthy" not in failure and "has died" not in failure:
                # Now and then the whole server crashes with its model: an error for all, at once.
                wait_until(lambda: server.exit_code is not None)
                break
        server.stop()
        if model == LLM:
            _expect_errors(clients)
    with running_server(repository) as server:
        answer = ask_grpc(server.addresses.grpc, LLM, make_fields(LLM, PROMPTS[1]))
        assert answer.texts == [generate(PROMPTS[1], max_tokens=48).text]


def _find_failure(server: TritonServer, model: str, fields: dict[str, Any]) -> str:
    """What a request is told, in its answer or where a client has lost the server already."""
    try:
        return ask_grpc(server.addresses.grpc, model, fields).failure
    except InferenceServerException as error:
        return str(error.message())


def _expect_errors(clients: list[StreamClient], message: str | None = None) -> None:
    """Every request in flight ends with an error; none is left waiting."""
    for client in clients:
        with pytest.raises(InferenceServerException, match=message):
            for _ in client.receive():
                pass
        client.close(cancel=True)

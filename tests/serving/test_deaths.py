"""A server, or the process of a model, that is killed under load: errors now, service again."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash_trt.serving.launcher import TritonServer
from dflash_trt.serving.tritonserver import TritonServerBinary
from tests.serving.client import CLASSIC, LLM, StreamClient, ask_grpc
from tests.serving.conftest import Generate, start_server, wait_idle
from tests.serving.test_cancellation import ENDLESS, long_fields

pytestmark = pytest.mark.slow


@pytest.fixture
def own_server(tritonserver: TritonServerBinary, repository: Path) -> Iterator[TritonServer]:
    """A server for this test to harm."""
    with start_server(repository) as running:
        running.wait_ready(120)
        yield running


def _stub(server: TritonServer, model: str) -> int:
    """Process id of the model's stub."""
    children = subprocess.run(
        ["ps", "-o", "pid=,args=", "--ppid", str(server.pid)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    return next(int(line.split()[0]) for line in children if f"/{model}/" in line)


@pytest.mark.parametrize("model", [LLM, CLASSIC])
def test_a_killed_model_is_started_again(
    own_server: TritonServer, generate: Generate, prompts: list[str], model: str
) -> None:
    addresses = own_server.addresses
    clients = [StreamClient(addresses.grpc) for _ in range(4)]
    for client in clients:
        client.send(model, long_fields(model, prompts[0]), parameters=ENDLESS)
        next(client.receive())
    os.kill(_stub(own_server, LLM), signal.SIGKILL)
    fields = {"text_input": prompts[1], "sampling_param_max_tokens": 24}
    deadline = time.monotonic() + 30
    while (answer := ask_grpc(addresses.grpc, LLM, fields)).error is not None:
        assert time.monotonic() < deadline, answer.failure
        time.sleep(0.2)
    assert answer.texts == [generate(prompts[1], max_tokens=24).text]
    for client in clients:
        with pytest.raises(Exception, match=r"."):
            for _ in client.receive(20):
                pass
    for client in clients:
        client.close(cancel=True)
    wait_idle(addresses)


def test_a_killed_server_is_an_error_and_its_successor_serves(
    tritonserver: TritonServerBinary, repository: Path, generate: Generate, prompts: list[str]
) -> None:
    with start_server(repository) as server:
        server.wait_ready(120)
        clients = [StreamClient(server.addresses.grpc) for _ in range(4)]
        for client in clients:
            client.send(LLM, long_fields(LLM, prompts[0]), parameters=ENDLESS)
            next(client.receive())
        server.send_signal(signal.SIGKILL)
        for client in clients:
            with pytest.raises(Exception, match=r"."):
                for _ in client.receive(20):
                    pass
            client.close(cancel=True)
    with start_server(repository) as server:
        server.wait_ready(120)
        fields = {"text_input": prompts[1], "sampling_param_max_tokens": 24}
        expected = generate(prompts[1], max_tokens=24).text
        assert ask_grpc(server.addresses.grpc, LLM, fields).texts == [expected]

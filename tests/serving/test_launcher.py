"""The server as a child process: found, started, waited for, stopped, and gone without a trace."""

from __future__ import annotations

import socket
import sys
import textwrap
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from dflash_trt.errors import DflashError
from dflash_trt.serving.server import tritonserver
from dflash_trt.serving.server.addresses import (
    RESTRICTED,
    client_address,
    restriction_options,
)
from dflash_trt.serving.server.launcher import ServerAddresses, TritonServer
from dflash_trt.serving.server.tritonserver import TritonServerBinary, find_tritonserver
from tests.inspection import server_traces
from tests.serving.client import LLM, ask_grpc, make_fields
from tests.serving.served import fetch, server_options
from tests.waiting import PATIENCE_S

CONFIG = """
backend: "python"
max_batch_size: 0
input [ { name: "text" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "text" data_type: TYPE_STRING dims: [ 1 ] } ]
instance_group [ { count: 1 kind: KIND_CPU } ]
"""
ECHO = """
class TritonPythonModel:
    def execute(self, requests):
        return []

    def finalize(self):
        if self.slow:
            import time; time.sleep(60)
"""


def _write_repository(
    folder: Path, initialize: str = "pass", *, slow_to_unload: bool = False
) -> Path:
    """A repository of one Python model that runs `initialize` when it is loaded."""
    (folder / "echo" / "1").mkdir(parents=True)
    (folder / "echo" / "config.pbtxt").write_text(CONFIG, encoding="utf-8")
    initialize = f"self.slow = {slow_to_unload}; {initialize}"
    body = ECHO + "    def initialize(self, args):\n" + textwrap.indent(initialize, " " * 8)
    (folder / "echo" / "1" / "model.py").write_text(body, encoding="utf-8")
    return folder


@pytest.mark.exhaustive
def test_runs_models_with_this_interpreter_and_leaves_nothing(
    tritonserver: TritonServerBinary, tmp_path: Path
) -> None:
    log = tmp_path / "log" / "server.log"
    log.parent.mkdir()
    repository = _write_repository(
        tmp_path / "my models",
        "import numpy, os, sys; print('python', sys.prefix, os.listdir('.'), flush=True)",
        slow_to_unload=True,
    )
    with TritonServer(server_options(repository, log_file=log, exit_timeout_s=1)) as server:
        server.wait_ready(PATIENCE_S)
        assert server.is_ready() and server.exit_code is None
        traces = server_traces(server)
        assert len(traces) > 1
        for address in astuple(server.addresses):
            host, _, port = address.rpartition(":")
            assert host == "127.0.0.1"
            socket.create_connection((host, int(port)), timeout=PATIENCE_S).close()
            for other in _own_addresses():  # nobody else's network reaches it
                with pytest.raises(OSError):
                    socket.create_connection((other, int(port)), timeout=5)
        assert server.stop() == 1, "of others' models it is not known whether they had requests"
    assert server.exit_code == 1 and not server.is_ready()
    assert f"python {sys.prefix} []" not in log.read_text()  # the server's folder, not the user's
    assert f"python {sys.prefix} [" in log.read_text()
    assert not any(path.exists() for path in traces)


def _own_addresses() -> list[str]:
    """Addresses of this machine besides the loopback one."""
    found = socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)
    return [str(one[4][0]) for one in found if not str(one[4][0]).startswith("127.")]


def test_the_servers_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """PATH comes before NGC's place, that before the wheel's; without any there is advice."""
    binary = tmp_path / "bin" / "tritonserver"
    binary.parent.mkdir()
    binary.write_text("#!/bin/sh\n")
    binary.chmod(0o755)
    wheel = tmp_path / "wheel"
    (wheel / "bin").mkdir(parents=True)
    (wheel / "bin" / "tritonserver").write_text("")
    monkeypatch.setenv("PATH", str(binary.parent))
    monkeypatch.setattr(tritonserver, "NGC_BINARY", tmp_path / "ngc")
    monkeypatch.setattr(tritonserver, "find_wheel", lambda: wheel)
    (tmp_path / "ngc").write_text("")
    assert find_tritonserver() == TritonServerBinary(binary)
    binary.unlink()
    assert find_tritonserver() == TritonServerBinary(tmp_path / "ngc")
    (tmp_path / "ngc").unlink()
    assert find_tritonserver() == TritonServerBinary(wheel / "bin" / "tritonserver", wheel)
    monkeypatch.setattr(tritonserver, "find_wheel", lambda: None)
    with pytest.raises(DflashError, match=r"pip install 'dflash-trt\[serve\]'"):
        find_tritonserver()


@pytest.mark.parametrize(
    ("host", "reached"),
    [
        ("127.0.0.1", "127.0.0.1:8000"),
        ("0.0.0.0", "127.0.0.1:8000"),
        ("::", "[::1]:8000"),
        ("node7", "node7:8000"),
    ],
)
def test_addresses_are_what_a_client_writes(host: str, reached: str) -> None:
    assert client_address(host, 8000) == reached


@pytest.mark.exhaustive
@pytest.mark.parametrize("host", ["localhost", "::1"])
def test_names_and_ipv6_serve(tritonserver: TritonServerBinary, tmp_path: Path, host: str) -> None:
    """Triton server looks up no names, and writes IPv6 in one way for gRPC, in another for HTTP."""
    if host == "::1":
        with socket.socket(socket.AF_INET6) as probe:
            try:
                probe.bind((host, 0))
            except OSError:
                pytest.skip("this machine has no IPv6")
    repository = _write_repository(tmp_path / "repository")
    with TritonServer(server_options(repository, host=host, expose_http=True)) as server:
        server.wait_ready(PATIENCE_S)
        for address in astuple(server.addresses):
            _, _, port = address.rpartition(":")
            socket.create_connection((host, int(port)), timeout=PATIENCE_S).close()


CLOSED_OVER_HTTP = (
    ("GET", "/v2/systemsharedmemory/status"),
    ("POST", "/v2/cudasharedmemory/region/x/register"),
    ("POST", f"/v2/models/{LLM}/trace/setting"),
    ("POST", "/v2/logging"),
    ("POST", f"/v2/repository/models/{LLM}/unload"),
)
CLOSED_OVER_GRPC: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("register_system_shared_memory", ("x", "/x", 64)),
    ("register_cuda_shared_memory", ("x", b"eA==", 0, 64)),
    ("update_trace_settings", ()),
    ("update_log_settings", ({"log_file": "/tmp/x"},)),
    ("load_model", (LLM,)),
)


def test_what_is_not_for_clients_is_closed(addresses: ServerAddresses) -> None:
    """Nothing registers memory, writes files or unloads models."""
    for method, path in CLOSED_OVER_HTTP:
        status, content, _ = fetch(addresses.http, path, {}, method)
        assert status == 403 and b"restricted" in content, (path, content)
    with grpcclient.InferenceServerClient(addresses.grpc) as client:
        for name, arguments in CLOSED_OVER_GRPC:
            with pytest.raises(InferenceServerException, match="restricted"):
                getattr(client, name)(*arguments)
    assert ask_grpc(addresses.grpc, LLM, make_fields(LLM, "host", max_tokens=2)).error is None
    first, second = restriction_options(), restriction_options()
    assert len(first) == 2 and not set(first) & set(second), "the word that opens them changes"


def test_what_others_start_closes_the_same() -> None:
    """The script beside a TensorRT-LLM deployment."""
    folder = Path(__file__).parents[2] / "dflash_trt" / "deploy" / "trtllm" / "templates"
    text = (folder / "serve-triton.sh.j2").read_text(encoding="utf-8")
    assert f"{','.join(RESTRICTED)}:" in text and "--http-address=127.0.0.1" in text
    for option in ("--http-restricted-api=", "--grpc-restricted-protocol="):
        assert option in text, option

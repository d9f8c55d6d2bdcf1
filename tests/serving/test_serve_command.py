"""`serve` as a process: what it shows, how it ends, what it refuses."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import pytest

from dflash_trt.errors import DflashError
from dflash_trt.serving.openai.server import OpenAiServer
from dflash_trt.serving.server.launcher import ServerOptions, TritonServer
from dflash_trt.serving.server.service import Service
from dflash_trt.serving.server.tritonserver import TritonServerBinary
from tests.cli.conftest import Run, run  # noqa: F401
from tests.serving.served import FREE_PORTS, LONG_CONTEXT
from tests.waiting import PATIENCE_S, wait_until

FAKE = Path(__file__).parents[1] / "standins" / "tritonserver.py"
FREE = ["--grpc-port", "0", "--http-port", "0", "--metrics-port", "0"]

Serve = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """What looks like a model repository."""
    (tmp_path / "repository" / "model").mkdir(parents=True)
    (tmp_path / "repository" / "model" / "config.pbtxt").write_text("")
    return tmp_path / "repository"


@pytest.fixture
def fake_server(tmp_path: Path) -> Path:
    """A folder for PATH, with the fake server in it."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "tritonserver").write_text(f'#!/bin/sh\nexec {sys.executable} {FAKE} "$@"\n')
    (folder / "tritonserver").chmod(0o755)
    return folder


@pytest.fixture
def start(tmp_path: Path, fake_server: Path) -> Generator[Serve, None, None]:
    """Starts `serve` with the fake server in one of its modes."""
    started: list[subprocess.Popen[str]] = []

    def call(mode: str, *arguments: object) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "dflash_trt", "serve", *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "PATH": f"{fake_server}{os.pathsep}{os.environ['PATH']}",
                "FAKE_TRITONSERVER": mode,
                "TMPDIR": str(tmp_path),
            },
        )
        started.append(process)
        return process

    yield call
    for process in started:
        process.kill()
        process.communicate()


@contextmanager
def _handling(number: signal.Signals, how: signal.Handlers) -> Iterator[None]:
    """What is started within begins with this handling of the signal."""
    before = signal.signal(number, how)
    try:
        yield
    finally:
        signal.signal(number, before)


def _wait_ready(process: subprocess.Popen[str], lines: int = 3) -> list[str]:
    """What it prints once it is ready."""
    assert process.stdout is not None
    first = process.stdout.readline()
    assert first.startswith("ready after "), (first, process.communicate())
    return [process.stdout.readline().strip() for _ in range(lines)]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_runs_until_a_signal(
    start: Serve, repository: Path, tmp_path: Path, number: signal.Signals
) -> None:
    log = tmp_path / "server.log"
    with _handling(signal.SIGHUP, signal.SIG_DFL):  # these tests may run under `nohup`
        process = start("well", repository, *FREE, "--log-file", log)
    addresses = _wait_ready(process)
    assert [line.split()[0] for line in addresses] == ["gRPC", "HTTP", "metrics"]
    assert all("://127.0.0.1:" in line for line in addresses)
    assert process.poll() is None
    process.send_signal(number)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out) == (0, "")
    assert "error" not in err and err.startswith("starting ")
    assert "exiting" in log.read_text()
    assert not list(tmp_path.glob("dflash-trt-server-*"))


def test_nohup_is_heeded(start: Serve, repository: Path) -> None:
    """What ignores SIGHUP from the start goes on doing so."""
    with _handling(signal.SIGHUP, signal.SIG_IGN):
        process = start("well", repository, *FREE)
    _wait_ready(process)
    process.send_signal(signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.5)
    process.terminate()
    assert process.wait(PATIENCE_S) == 0


def test_a_second_signal_does_not_wait(
    fake_server: Path, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a server that would be given hours to end."""
    monkeypatch.setenv("PATH", f"{fake_server}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_TRITONSERVER", "stubborn")
    options = ServerOptions(
        repository=repository, http_port=0, grpc_port=0, metrics_port=0, exit_timeout_s=10_000
    )

    async def signal_twice() -> int:
        ready = asyncio.Event()
        with Service() as service, TritonServer(options) as server:
            running = asyncio.create_task(service.run(server, None, ready.set))
            await asyncio.wait_for(ready.wait(), PATIENCE_S)
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.to_thread(wait_until, lambda: "heard" in server.log_file.read_text())
            assert not running.done()
            os.kill(os.getpid(), signal.SIGTERM)
            return await asyncio.wait_for(running, PATIENCE_S)

    assert asyncio.run(signal_twice()) == 128 + signal.SIGKILL


def test_a_signal_before_it_is_ready(start: Serve, repository: Path, tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    process = start("slow", repository, *FREE, "--log-file", log)
    assert process.stderr is not None and process.stderr.readline().startswith("starting ")
    wait_until(lambda: "asked" in log.read_text())
    process.terminate()
    out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out, err) == (0, "", "")


def test_a_signal_before_there_is_a_server(
    fake_server: Path, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{fake_server}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_TRITONSERVER", "well")

    async def run_at_once() -> None:
        with Service() as service:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.wait_for(service._stopping.wait(), PATIENCE_S)
            options = ServerOptions(repository=repository, http_port=0, grpc_port=0, metrics_port=0)
            server = TritonServer(options)
            await service.run(server, None, pytest.fail)
            assert server.exit_code in (0, 128 + signal.SIGTERM)  # it may not listen yet

    asyncio.run(run_at_once())


def test_ports_are_held_until_the_server_has_them(
    fake_server: Path, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{fake_server}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_TRITONSERVER", "closed")
    options = ServerOptions(repository=repository, http_port=0, grpc_port=0, metrics_port=0)
    with TritonServer(options) as server:
        host, _, port = server.addresses.metrics.rpartition(":")
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind((host, int(port)))
    with socket.socket() as other:
        other.bind((host, int(port)))


@pytest.mark.parametrize("mode", ["closed", "other"])
def test_a_server_is_not_ready_before_its_metrics_nor_under_another_name(
    fake_server: Path, repository: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setenv("PATH", f"{fake_server}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_TRITONSERVER", mode)
    options = ServerOptions(repository=repository, http_port=0, grpc_port=0, metrics_port=0)
    with TritonServer(options) as server:

        def says_so() -> bool:
            assert not server.is_ready()
            return "asked" in server.log_file.read_text()

        wait_until(says_so)
        with pytest.raises(DflashError, match=r"was not ready within 0\.2 s"):
            server.wait_ready(0.2)


def test_the_servers_exit_code_is_its_own(start: Serve, repository: Path) -> None:
    process = start("dies", repository, *FREE)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 3 and out.startswith("ready after ")
    (line,) = (line for line in err.splitlines() if line.startswith("error: "))
    assert "tritonserver: ended by itself: error: the last words" in line


def test_a_model_that_does_not_load(start: Serve, repository: Path) -> None:
    process = start("unloadable", repository, *FREE)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out) == (1, "")
    (line,) = (line for line in err.splitlines() if line.startswith("error: "))
    assert "failed to load 'm' version 1: Internal: ValueError: no weights here" in line
    assert "model.py" not in line


def test_ports(run: Run, start: Serve, repository: Path) -> None:  # noqa: F811
    twice = ["--grpc-port", 8100, "--metrics-port", 8100]
    run("serve", repository, *twice).fails(2, "--metrics-port", "8100 is --grpc-port already")
    run("serve", repository, "--http-port", 70000).fails(2, "--http-port")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for option in ("--http-port", "--grpc-port", "--metrics-port"):
            process = start("well", repository, *FREE, option, port)
            out, err = process.communicate(timeout=PATIENCE_S)
            assert (process.returncode, out) == (2, "")
            assert err.startswith(f"error: {option}: 127.0.0.1:{port}: Address already in use")
            assert len(err.splitlines()) == 1


def test_sources_that_cannot_be_served(run: Run, tmp_path: Path) -> None:  # noqa: F811
    (tmp_path / "empty").mkdir()
    pieces = ("neither a bundle nor a model repository", "dflash-trt package")
    run("serve", tmp_path / "empty").fails(2, str(tmp_path / "empty"), *pieces)
    run("serve", tmp_path / "none").fails(2, *pieces)
    (tmp_path / "file").touch()
    run("serve", tmp_path / "file").fails(2, "is a file")
    (tmp_path / "repository" / "model").mkdir(parents=True)
    (tmp_path / "repository" / "model" / "config.pbtxt").touch()
    run("serve", tmp_path / "repository", "--no-speculation").fails(
        2, "--no-speculation", "is a model repository", "package --no-speculation"
    )
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "manifest.json").write_text("{}")
    run("serve", tmp_path / "damaged").fails(1, "schema version")


def test_no_tritonserver(
    run: Run,  # noqa: F811
    repository: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr("dflash_trt.serving.server.tritonserver.NGC_BINARY", Path("/nowhere"))
    monkeypatch.setattr("dflash_trt.serving.server.tritonserver._find_wheel", lambda: None)
    run("serve", repository).fails(1, "there is no tritonserver", "dflash-trt[serve]")


class _DyingFront:
    """A front that starts, and fails a little later."""

    started = True

    async def run(self) -> None:
        await asyncio.sleep(0.1)
        raise DflashError("the front failed")

    def stop(self, *, force: bool = False) -> None:
        pass


def test_a_front_that_fails_takes_the_server_along(
    fake_server: Path, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{fake_server}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_TRITONSERVER", "well")
    ready: list[bool] = []

    async def run_both(server: TritonServer) -> None:
        front = cast(OpenAiServer, _DyingFront())
        with Service() as service:
            await service.run(server, front, lambda: ready.append(True))

    options = ServerOptions(repository=repository, http_port=0, grpc_port=0, metrics_port=0)
    with TritonServer(options) as server:
        with pytest.raises(DflashError, match="the front failed"):
            asyncio.run(run_both(server))
        assert ready == [True] and server.exit_code == 0


@pytest.fixture
def serve_bundle(
    tritonserver: TritonServerBinary, long_bundle: Path
) -> Generator[tuple[subprocess.Popen[str], str], None, None]:
    """`serve` on a bundle with the real server, and its OpenAI front's URL."""
    packaged = set(long_bundle.parent.glob(".dflash-trt-serve-*"))
    process = subprocess.Popen(
        [sys.executable, "-m", "dflash_trt", "serve", str(long_bundle), *FREE_PORTS],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        url = _wait_ready(process, 4)[-1].split()[1]
        (mine,) = set(long_bundle.parent.glob(".dflash-trt-serve-*")) - packaged
        yield process, url
        assert process.poll() is None or not mine.exists()
    finally:
        process.kill()
        process.communicate()


def _open_stream(url: str, max_tokens: int) -> http.client.HTTPResponse:
    body = {"model": "demo", "prompt": "host", "max_tokens": max_tokens, "ignore_eos": True}
    data = json.dumps(body | {"stream": True}).encode()
    answer = urllib.request.urlopen(f"{url}/completions", data, timeout=PATIENCE_S)
    assert isinstance(answer, http.client.HTTPResponse)
    assert answer.readline().startswith(b"data: ")
    return answer


def test_requests_in_flight_end_before_the_server(
    serve_bundle: tuple[subprocess.Popen[str], str],
) -> None:
    process, url = serve_bundle
    # Few enough for the ten seconds that they may go on, on a machine with much else to do.
    with _open_stream(url, 64) as answer:
        process.terminate()
        assert answer.read().endswith(b"data: [DONE]\n\n")
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0


@pytest.mark.exhaustive
def test_a_killed_server_ends_the_front_and_its_requests(
    serve_bundle: tuple[subprocess.Popen[str], str],
) -> None:
    process, url = serve_bundle
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
    (server,) = (pid for pid in map(int, children.split()) if _is_server(pid))
    with _open_stream(url, LONG_CONTEXT // 2) as answer:
        os.kill(server, signal.SIGKILL)
        assert b'"type":"server_error"' in answer.read()
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 128 + signal.SIGKILL
    assert "tritonserver: ended by itself" in err.splitlines()[-1]


def _is_server(pid: int) -> bool:
    return b"tritonserver" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]

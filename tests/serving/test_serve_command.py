"""`serve` as a process: what it shows, how it ends, what it refuses."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import Mock
from urllib.parse import urlsplit

import pytest

from dflash_trt.cli import serve
from dflash_trt.models.build_config import data_folder
from dflash_trt.serving.openai.server import OpenAiServer
from dflash_trt.serving.server.launcher import ServerOptions, bind_port
from dflash_trt.serving.server.repository import BUNDLE_FOLDER
from dflash_trt.serving.server.supervisor import Service, Supervisor
from dflash_trt.text.tokenizer import BundleTokenizer
from tests.cli.bigram import write_bigram_pair
from tests.cli.conftest import Run
from tests.inspection import is_stopping
from tests.serving.served import (
    SERVER_PORTS,
    fetch,
    server_options,
    starting,
    wait_ready,
)
from tests.waiting import PATIENCE_S, wait_until

FAKE = Path(__file__).parents[1] / "standins" / "tritonserver.py"

Serve = Callable[..., subprocess.Popen[str]]
Fake = Callable[..., ServerOptions]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """What looks like a model repository."""
    (tmp_path / "repository" / "model").mkdir(parents=True)
    (tmp_path / "repository" / "model" / "config.pbtxt").write_text("")
    return tmp_path / "repository"


@pytest.fixture
def fake(tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    """Puts the fake server into PATH, in one of its modes; returns options to start it with."""
    binary = tmp_path / "bin" / "tritonserver"
    binary.parent.mkdir()
    binary.write_text(f'#!/bin/sh\nexec {sys.executable} {FAKE} "$@"\n')
    binary.chmod(0o755)
    monkeypatch.setenv("PATH", f"{binary.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("TMPDIR", str(tmp_path))

    def choose(mode: str, **options: Any) -> ServerOptions:
        monkeypatch.setenv("FAKE_TRITONSERVER", mode)
        return server_options(repository, **options)

    return choose


@pytest.fixture
def start(fake: Fake) -> Iterator[Serve]:
    """Starts `serve` with the fake server in one of its modes."""
    with ExitStack() as stack:

        def call(mode: str, *arguments: object) -> subprocess.Popen[str]:
            return stack.enter_context(starting(fake(mode).repository, *SERVER_PORTS, *arguments))

        yield call


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_runs_until_a_signal(start: Serve, tmp_path: Path, number: signal.Signals) -> None:
    log = tmp_path / "server.log"
    process = start("well", "--log-file", log)
    urls = wait_ready(process, 3)
    assert list(urls) == ["gRPC", "HTTP", "metrics"]
    most = min(1 << 16, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    assert resource.prlimit(process.pid, resource.RLIMIT_NOFILE)[0] == most  # what it may have
    process.send_signal(number)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out) == (0, "")
    assert "error" not in err and err.startswith("starting ")
    assert "exiting" in log.read_text()
    assert not list(tmp_path.glob("dflash-trt-server-*"))


def test_a_second_signal_does_not_wait(fake: Fake) -> None:
    """For a server that would be given hours to end."""
    options = fake("stubborn", exit_timeout_s=10_000)

    async def signal_twice() -> int:
        ready = asyncio.Event()
        with Service() as service:
            supervising = Supervisor(options)
            server = supervising.server
            running = asyncio.create_task(service.run(supervising, None, ready.set))
            await asyncio.wait_for(ready.wait(), PATIENCE_S)
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.to_thread(wait_until, lambda: "heard" in server.log_file.read_text())
            assert not running.done()
            os.kill(os.getpid(), signal.SIGTERM)
            return await asyncio.wait_for(running, PATIENCE_S)

    assert asyncio.run(signal_twice()) == 128 + signal.SIGKILL


def test_after_kill_9_nothing_is_left(start: Serve, tmp_path: Path) -> None:
    """Not even a server that heeds no signal, which has the ports."""
    process = start("stubborn")
    urls = wait_ready(process, 3)
    (folder,) = tmp_path.glob("dflash-trt-server-*")
    region = Path("/dev/shm", f"{folder.name}-of-a-model")
    region.touch()
    process.kill()
    wait_until(lambda: not (folder.exists() or region.exists()), "the end of the server's files")
    bind_port("127.0.0.1", urlsplit(urls["HTTP"]).port or 0, "--http-port").close()


def test_a_signal_before_it_is_ready(start: Serve, tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    process = start("slow", "--log-file", log)
    assert process.stderr is not None and process.stderr.readline().startswith("starting ")
    wait_until(lambda: "asked" in log.read_text())
    process.terminate()
    out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out, err) == (0, "", "")


def test_a_server_that_does_not_start(start: Serve) -> None:
    out, err = start("unloadable", "--max-restarts", 0).communicate(timeout=PATIENCE_S)
    assert not out and "model.py" not in err
    line = err.splitlines()[-1]
    assert "failed to load 'm' version 1: Internal: ValueError: no weights here" in line


def test_a_server_that_fails_again_and_again(start: Serve) -> None:
    """It is started again, on its ports, until that has failed as often as allowed."""
    process = start("dies", "--max-restarts", 1)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 3 and out.count("ready after ") == 1
    _, failed, again, given_up = err.splitlines()
    why = "ended by itself: error: the last words"
    assert failed == f"{why}; starting again in 0 s (1 of 1)"
    assert again.startswith("ready again after ")
    assert f"failed 2 times in 10 minutes, the last time: {why}" in given_up


def test_every_line_is_json(start: Serve) -> None:
    """The server's own, where its log goes there too, and the error that ends it all."""
    process = start(
        "dies", "--max-restarts", 0, "--log-format", "json", "--log-file", "/dev/stderr"
    )
    out, err = process.communicate(timeout=PATIENCE_S)
    told, messages = ([json.loads(one)["message"] for one in x.splitlines()] for x in (out, err))
    assert process.returncode == 3 and messages[0].startswith("starting ")
    assert told[0].startswith("ready after ")
    assert messages[-1].startswith("error: ") and "ended by itself" in messages[-1]
    assert any("the last words" in one for one in messages[1:-1])


def test_another_bundle_in_its_place_is_not_served(
    fake: Fake, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under the name of the first; and `package` does not put one there."""
    fake("dies")
    pair, first, second = write_bigram_pair(tmp_path / "pair"), tmp_path / "one", tmp_path / "two"
    run.well("build", "--target", pair, "-o", tmp_path / "bundle")
    run.well("package", tmp_path / "bundle", "-o", first)
    shutil.copytree(first, second)
    for file in (second / BUNDLE_FOLDER / "weights").rglob("*.safetensors"):
        os.utime(file, (0, 0))  # trained again: its header is the same
    with starting(first, *SERVER_PORTS) as process:
        wait_ready(process, 3)
        refused = run("package", tmp_path / "bundle", "-o", first, "--overwrite")
        refused.fails(2, f"{first}: is being served; choose another -o, or end the server first")
        first.rename(tmp_path / "former")
        second.rename(first)
        err = process.communicate(timeout=PATIENCE_S)[1]
    assert process.returncode == 1 and "starting again" in err
    assert f"{first} holds another bundle than the one that was served" in err.splitlines()[-1]
    run.well("package", tmp_path / "bundle", "-o", first, "--overwrite")


def test_ports(run: Run, repository: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for option in ("--http-port", "--grpc-port", "--metrics-port", "--openai-port"):
            outcome = run("serve", repository, *SERVER_PORTS, option, port)
            outcome.fails(2, f"error: {option}: 127.0.0.1:{port}: Address already in use")
            assert (outcome.out, len(outcome.err.splitlines())) == ("", 1)
    for host in ("a" * 3000, "\0"):
        run("serve", repository, *SERVER_PORTS, "--host", host).fails(2, "--host")


def test_the_page_is_there_unless_it_is_turned_off(
    run: Run, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages: list[bool] = []

    async def keep(*given: Any) -> int:
        pages.append(given[-1].page)
        return 0

    monkeypatch.setattr(serve, "_serve", keep)
    for more in ((), ("--openai-port", 0), ("--openai-port", 0, "--no-page")):
        run.well("serve", repository, *SERVER_PORTS, *more)
    assert pages == [True, True, False]
    run("serve", repository, *SERVER_PORTS, "--no-page").fails(2, "--no-page", "--openai-port")


@pytest.mark.parametrize(
    ("stated", "used", "told"),
    [
        ({"temperature": 0.6, "x": 1}, {"temperature": 0.6}, "temperature 0.6"),
        ({"do_sample": False, "temperature": None, "top_p": None}, {}, None),
        ({"top_p": 1.5}, None, "generation_config.json: top_p: 1.5 is not a number above 0"),
        ({"max_new_tokens": 1048576}, {"max_new_tokens": 1048576}, "max_new_tokens 1048576"),
        ({"top_k": 0.0}, None, "json: top_k: 0.0 is not an integer"),
        ({"temperature": True}, None, "json: temperature: True is not a finite number"),
        ({"repetition_penalty": "9" * 400}, None, "json: repetition_penalty: '999"),
        ({"max_new_tokens": 0}, None, "json: max_new_tokens: 0 is not an integer of at least 1"),
    ],
)
def test_a_checkpoints_sampling(
    run: Run,
    fake: Fake,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stated: dict[str, Any],
    used: dict[str, Any] | None,
    told: str | None,
) -> None:
    """`serve` and `inspect` say what is used where requests say nothing; a bad value is named."""
    fake("unloadable")
    pair, bundle = write_bigram_pair(tmp_path / "pair"), tmp_path / "bundle"
    (pair.parent / "target" / "generation_config.json").write_text(json.dumps(stated))
    run.well("build", "--target", pair, "-o", bundle)
    front = Mock(wraps=OpenAiServer)
    monkeypatch.setattr("dflash_trt.serving.openai.server.OpenAiServer", front)
    serve = ("serve", bundle, *SERVER_PORTS, "--openai-port", 0, "--max-restarts", 0)
    assert "states none" not in run(*serve, "--generation-config", "none").err
    assert front.call_args.args[-1] == {}
    served, shown = run(*serve).err, run.well("inspect", bundle).out
    assert run.well("inspect", bundle, "--json").json["sampling_defaults"] == used
    assert (used is None) == ("--generation-config none" in served) and len(served) < 900
    assert used is None or front.call_args.args[-1] == used
    for text in (served, shown):
        assert ("states none" in text) == bool(used) and (told is None or told in text)


def test_requests_that_end_in_time_end_well_and_so_does_the_command(fake: Fake) -> None:
    """Before a server that does as it is told: our part is to wait, to answer and to say so."""
    asked = {"model": "demo", "prompt": "host", "max_tokens": 30}
    answers: list[tuple[bool, int, bytes]] = []

    def ask(address: str, *, stream: bool) -> None:
        status, content, _ = fetch(address, "/v1/completions", asked | {"stream": stream})
        answers.append((stream, status, content))

    async def drain() -> int:
        ready = asyncio.Event()
        with Service() as service, bind_port("127.0.0.1", 0, "--openai-port") as bound:
            tokenizer = BundleTokenizer(data_folder("demo_pair") / "target")
            supervising = Supervisor(fake("drains", exit_timeout_s=60))
            front = OpenAiServer("demo", supervising, tokenizer, 4096, bound)
            running = asyncio.create_task(service.run(supervising, front, ready.set))
            await asyncio.wait_for(ready.wait(), PATIENCE_S)
            address = f"127.0.0.1:{bound.getsockname()[1]}"
            asking = [
                asyncio.create_task(asyncio.to_thread(ask, address, stream=stream))
                for stream in (True, False, True, False)
            ]
            log = supervising.server.log_file
            await asyncio.to_thread(wait_until, lambda: "4 running" in log.read_text())
            assert not answers
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.to_thread(wait_until, lambda: is_stopping(service))
            refused = await asyncio.to_thread(fetch, address, "/v1/completions", asked)
            assert refused[0] == 503 and b"the server is shutting down" in refused[1]
            await asyncio.gather(*asking)
            return await asyncio.wait_for(running, PATIENCE_S)

    assert asyncio.run(drain()) == 0
    assert sorted(stream for stream, _, _ in answers) == [False, False, True, True]
    for stream, status, content in answers:
        assert status == 200 and b'"error"' not in content, content
        assert content.count(b'"finish_reason":"length"') == 1
        assert content.endswith(b"data: [DONE]\n\n") == stream

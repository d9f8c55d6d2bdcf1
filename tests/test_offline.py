"""What runs on local folders asks nobody, and leaves nothing in a user's home."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from dflash_trt.cli.main import main
from dflash_trt.serving.server.tritonserver import TritonServerBinary
from tests.serving.served import FREE_PORTS, LLM, ask_grpc, fetch, make_fields, starting, wait_ready
from tests.waiting import PATIENCE_S
from tests.watched import UNSET


def test_build_and_generate_ask_nobody(tmp_path: Path) -> None:
    """ONNX Runtime's telemetry, were it on, would leave its database in the home at once."""
    home, bundle, asked = tmp_path / "home", str(tmp_path / "bundle"), tmp_path / "asked"
    home.mkdir()
    environment = {key: value for key, value in os.environ.items() if key not in UNSET}
    watched = [sys.executable, "-m", "tests.watched", str(asked), "dflash_trt"]
    for command in (
        ["build", "--target", "demo", "-o", bundle],
        ["generate", bundle, "--prompt", "hello", "--max-tokens", "4"],
    ):
        environment["HOME"] = str(home)
        done = subprocess.run([*watched, *command], env=environment, stderr=subprocess.PIPE)
        assert done.returncode == 0, done.stderr
    assert asked.read_text() == ""
    left = [path for path in home.rglob("*") if path.is_file()]
    assert {path.parent for path in left} == {home / ".cache" / "dflash-trt" / "tokenizers"}


def test_serving_asks_nobody(
    tritonserver: TritonServerBinary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a local bundle to answers on both ports, the server's own libraries included."""
    bundle, asked = tmp_path / "bundle", tmp_path / "asked"
    assert main(["build", "--target", "demo", "-o", str(bundle)]) == 0
    for name in UNSET:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    with starting(bundle, *FREE_PORTS, run=("tests.watched", str(asked), "dflash_trt")) as process:
        urls = wait_ready(process)
        body = {"model": "demo", "prompt": "host", "max_tokens": 4}
        host = urlsplit(urls["OpenAI"]).netloc
        assert fetch(host, "/v1/completions", body)[0] == 200
        fields = make_fields(LLM, "host", max_tokens=4)
        assert ask_grpc(urls["gRPC"].removeprefix("grpc://"), LLM, fields).error is None
        process.terminate()
        assert process.wait(PATIENCE_S) == 0
    assert asked.read_text() == ""
    assert not list((tmp_path / "home").rglob("*.db*"))

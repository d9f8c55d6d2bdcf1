"""What runs on local folders asks nobody, and leaves nothing in a user's home."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.offline import run_offline


def test_build_and_generate_ask_nobody(tmp_path: Path) -> None:
    """ONNX Runtime's telemetry, were it on, would leave its database in the home at once."""
    home, bundle = tmp_path / "home", str(tmp_path / "bundle")
    home.mkdir()
    for command in (
        ["build", "--target", "demo", "-o", bundle],
        ["generate", bundle, "--prompt", "hello", "--max-tokens", "4"],
    ):
        done = run_offline("dflash_trt", *command, home=home)
        assert done.returncode == 0, (done.returncode, done.stderr)
    left = [path for path in home.rglob("*") if path.is_file()]
    assert {path.parent for path in left} == {home / ".cache" / "dflash-trt" / "tokenizers"}


def test_the_guard_sees_native_look_ups(tmp_path: Path) -> None:
    (tmp_path / "asks.py").write_text(
        "import socket, threading\n"
        "print('asks', flush=True)\n"
        "one = threading.Thread(target=socket.getaddrinfo, args=('telemetry.invalid', 443))\n"
        "one.start(), one.join()\n"
        "print('was answered')\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.offline", "asks"],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (-signal.SIGSYS, "asks\n")


@pytest.mark.parametrize(("given", "kept"), [({}, "1"), ({"ORT_DISABLE_TELEMETRY": "0"}, "0")])
def test_telemetry_is_off_unless_its_user_set_it(given: dict[str, str], kept: str) -> None:
    show = "import os, dflash_trt; print(os.environ['ORT_DISABLE_TELEMETRY'])"
    environment = {k: v for k, v in os.environ.items() if k != "ORT_DISABLE_TELEMETRY"} | given
    done = subprocess.run(
        [sys.executable, "-c", show], env=environment, capture_output=True, text=True
    )
    assert done.stdout == f"{kept}\n", done.stderr

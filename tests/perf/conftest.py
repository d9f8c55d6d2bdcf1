"""A stub server in a process of its own, and prompts for it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("tritonclient.grpc", reason="the perf extra is not installed")

CHECKOUT = Path(__file__).parents[2]
STUB = "tests.standins.served_model"


@dataclass(frozen=True)
class Stub:
    """Where the stub server listens."""

    grpc: str
    http: str


@contextmanager
def run_stub(log: Path) -> Iterator[Stub]:
    """The stub server, which ends when its standard input is closed."""
    command = [sys.executable, "-m", STUB, str(log)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=CHECKOUT, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        ports = json.loads(process.stdout.readline())
        yield Stub(f"127.0.0.1:{ports['grpc']}", f"http://127.0.0.1:{ports['http']}")


@pytest.fixture(scope="session")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stub]:
    with run_stub(tmp_path_factory.mktemp("stub") / "truth.jsonl") as stub:
        yield stub


@pytest.fixture(scope="session")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seven short ones."""
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"number {n}"}) + "\n" for n in range(7)))
    return path

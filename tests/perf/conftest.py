"""A stub server in a process of its own, and sweeps against it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import PATIENCE_S

pytest.importorskip("tritonclient.grpc", reason="the perf extra is not installed")

ROOT = Path(__file__).parent.parent.parent


@dataclass(frozen=True)
class Stub:
    """Where the stub server listens, and what it wrote down."""

    grpc: str
    http: str
    log: Path

    def truth(self, model: str) -> dict[int, dict[str, Any]]:
        """By seed, the latest answer of a model."""
        lines = map(json.loads, self.log.read_text().splitlines())
        return {line["seed"]: line for line in lines if line["model"] == model}


def start_stub(log: Path) -> tuple[subprocess.Popen[str], Stub]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.perf.stub_server", str(log)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    ports = json.loads(process.stdout.readline())
    addresses = (f"127.0.0.1:{ports['grpc']}", f"http://127.0.0.1:{ports['http']}")
    return process, Stub(*addresses, log)


def stop_stub(process: subprocess.Popen[str]) -> None:
    process.communicate(timeout=PATIENCE_S)


@pytest.fixture(scope="session")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stub]:
    process, stub = start_stub(tmp_path_factory.mktemp("stub") / "truth.jsonl")
    yield stub
    stop_stub(process)


@pytest.fixture(scope="session")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"number {n}"}) + "\n" for n in range(7)))
    return path

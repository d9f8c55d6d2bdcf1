"""A stub server in a process of its own, and sweeps against it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.perf.stub import Stub, run_stub, write_prompts

pytest.importorskip("tritonclient.grpc", reason="the perf extra is not installed")


@pytest.fixture(scope="session")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stub]:
    with run_stub(tmp_path_factory.mktemp("stub") / "truth.jsonl") as stub:
        yield stub


@pytest.fixture(scope="session")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prompts(tmp_path_factory.mktemp("prompts") / "prompts.jsonl")

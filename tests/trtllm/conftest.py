"""The command line, and a tiny pair whose configuration has hardware profiles."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.bigram import write_bigram_pair
from tests.cli.conftest import Run, run

__all__ = ["Run", "run"]

PROFILES = """\
profiles:
  one: {gpu: b200, max_batch: 4, max_seq_len: 64}
  two: {gpu: h100, gpus: 2, tensor_parallel: 2}
  three: {gpu: b200, gpus: 3, tensor_parallel: 3}
  experts: {gpu: b200, gpus: 2, tensor_parallel: 2, expert_parallel: 2}
  ada: {gpu: l40s, precision: nvfp4}
  nowhere: {gpu: b2000}
"""


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The YAML of a tiny Qwen3 pair that no test changes."""
    path = write_bigram_pair(tmp_path_factory.mktemp("pair"))
    with path.open("a", encoding="utf-8") as file:
        file.write(PROFILES)
    return path

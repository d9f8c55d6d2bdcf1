"""The command line, and a tiny pair whose configuration has a hardware profile."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.bigram import write_bigram_pair
from tests.cli.conftest import Run, run

__all__ = ["Run", "run"]

PROFILES = """\
profiles:
  one: {gpu: b200, max_batch: 4, max_seq_len: 64}
"""


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The YAML of a tiny Qwen3 pair that no test changes."""
    path = write_bigram_pair(tmp_path_factory.mktemp("pair"))
    with path.open("a", encoding="utf-8") as file:
        file.write(PROFILES)
    return path

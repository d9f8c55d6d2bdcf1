"""The interpreter's process, one for all tests of kernels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from dflash_plugins.testing.interpreter import Interpreter

WRITTEN_HEADS = [(8, 128), (8, 64), (1, 256), (20, 64), (3, 80)]
"""KV heads and head sizes of public pairs, a single head, more heads than one program takes, and a
head size that is no power of two."""


@pytest.fixture(scope="session")
def interpreter() -> Iterator[Interpreter]:
    """Runs kernels in a process that interprets; this one never does."""
    pytest.importorskip("triton", reason="Triton language (the plugins extra) is not installed")
    with Interpreter() as running:
        yield running

"""What the tests need that start a real Triton server."""

from __future__ import annotations

import os

import pytest

from dflash_trt.errors import DflashError
from dflash_trt.serving.tritonserver import TritonServerBinary, find_tritonserver


@pytest.fixture(scope="session")
def tritonserver() -> TritonServerBinary:
    """The server that will be started; in CI its absence is a failure."""
    try:
        return find_tritonserver()
    except DflashError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(error.message)
